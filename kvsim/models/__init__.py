"""What is run: models, their layer kinds, Hugging Face configurations and the catalogue.

May import traces and the ground (kvsim.errors, files, graph, search).
"""
