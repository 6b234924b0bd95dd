"""The checks of `lachesis doctor`, one module per subject; each returns findings and changes nothing."""
