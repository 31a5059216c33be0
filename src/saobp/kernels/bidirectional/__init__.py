"""Potts factors without causality: three sweeps over tiles, or one launch up to 128 tokens."""
