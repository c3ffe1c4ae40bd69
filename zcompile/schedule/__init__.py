"""Options, pipelines of passes, and how far ahead gathers start."""
