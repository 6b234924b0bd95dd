"""What a teacher's answers become: arrays of a group, and spans of tokens for a teacher of another tokenizer. Pure."""
