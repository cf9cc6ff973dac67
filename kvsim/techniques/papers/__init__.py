"""One file per paper or engine feature; `ls` lists what kvsim offers."""
