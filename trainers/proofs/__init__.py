"""What gradient proofs of the trainers train on."""
