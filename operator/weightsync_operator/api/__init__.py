"""The WeightSync API, v1alpha1: its types, and the CRD that is generated from them."""
