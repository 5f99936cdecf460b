"""The fixed samples and small models of gradient proofs."""
