"""From a teacher's answers to the columns of a group, and spans across tokenizers. Pure."""
