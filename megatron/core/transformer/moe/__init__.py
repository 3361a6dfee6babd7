"""Mixture-of-experts layers: router, dispatch of tokens to ranks, experts, and their balance."""
