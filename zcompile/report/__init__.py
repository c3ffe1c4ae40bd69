"""What people read of programs: pages, dumps, drawings."""
