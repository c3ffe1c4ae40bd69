"""`python -m zcompile`, the same as the command `zcompile`."""

from zcompile.tools.command_line import main

main()
