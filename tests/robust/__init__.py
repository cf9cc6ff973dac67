"""Nothing breaks kvsim: any file, any option, any moment."""
