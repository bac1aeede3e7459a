"""Answer every line of a file and save the answers as JSON: `python examples/save_answers.py QUESTIONS ANSWERS`."""

import json
import sys
from pathlib import Path

from meshinfer.config import folders
from meshinfer.engine.sampling import Sampling
from meshinfer.models.chat import Chat, ChatOptions

if len(sys.argv) != 3:
    sys.exit("usage: python examples/save_answers.py QUESTIONS ANSWERS")
questions, answers = map(Path, sys.argv[1:])
chat = Chat.prepare(folders(), "smollm2-135m", ChatOptions())

saved = []
for question in filter(str.strip, questions.read_text("utf-8").splitlines()):
    with chat.answer([{"role": "user", "content": question}], Sampling(), max_tokens=32) as answer:
        saved.append({"question": question, "answer": "".join(answer), "tokens": answer.tokens})
answers.write_text(json.dumps(saved, indent=1, ensure_ascii=False), "utf-8")
print(f"{len(saved)} answers in {answers}")
