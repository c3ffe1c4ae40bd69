"""zcompile in other libraries' trainers. Each module needs the library that it is named after."""
