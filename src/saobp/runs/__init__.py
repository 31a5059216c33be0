"""The folder of a run: names, reader and writer."""
