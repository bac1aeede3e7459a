"""`python -m meshinfer`, for where scripts are not on the path."""

from meshinfer.cli.main import main

main(prog_name="meshinfer")
