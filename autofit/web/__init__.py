"""The page of `autofit web`: a server for strangers, and its answers. Pasted text runs no code and is not kept."""
