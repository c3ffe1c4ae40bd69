"""zcompile within the trainers of others. Each module needs the library that it is named after; nothing else does."""
