"""From configs of other libraries to the lines of zcompile: `zcompile migrate`. Imports no torch."""
