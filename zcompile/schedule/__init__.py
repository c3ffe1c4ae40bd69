"""Options, pipelines, and how far ahead gathers start."""
