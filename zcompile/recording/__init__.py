"""Recordings on disk: the inputs of a rank's runs of programs, and the results of each line."""
