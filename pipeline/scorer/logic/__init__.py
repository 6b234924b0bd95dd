"""Pure logic of scoring: aggregation of ratings and the reliability of raters."""
