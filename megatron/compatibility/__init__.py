"""Names that code written for Megatron imports and the framework itself does not use.

`import_hook` makes the names of `aliases.tsv` importable. The other modules define names that the
framework itself does not use; each is named after the module, or modules, of Megatron it replaces.
"""
