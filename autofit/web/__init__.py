"""The page of `autofit web`: a server for strangers, and its answers. What is pasted runs no code and is not kept."""
