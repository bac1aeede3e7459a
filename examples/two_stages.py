"""Stream an answer through two stages: `python examples/two_stages.py [QUESTION]`."""

import sys

from meshinfer.config import folders
from meshinfer.engine.sampling import Sampling
from meshinfer.models.chat import Chat, ChatOptions

question = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?"
options = ChatOptions(stages=2, precision="exact")  # exact: the answer is that of one stage, token for token

chat = Chat.prepare(folders(), "smollm2-135m", options)
with chat.answer([{"role": "user", "content": question}], Sampling(), max_tokens=64) as answer:
    for piece in answer:
        print(piece, end="", flush=True)
print()
