"""Recordings: what one rank's runs of programs were given and what each line of them gave, on disk."""
