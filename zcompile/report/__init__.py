"""Reports on programs for people: pages, dumps, drawings."""
