"""`python -m zcompile`, the same as the command `zcompile`."""

from zcompile.command_line import main

main()
