"""Names that code written for Megatron imports and the framework itself does not use.

`import_hook` makes the names of `aliases.tsv` importable. The other modules define the names that
exist for such code alone; each has the name of the Megatron module, or group of modules, it serves.
"""
