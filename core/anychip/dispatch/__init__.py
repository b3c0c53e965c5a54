"""From a call to the row that serves it: two doors, resolution, autograd, policy, provenance.

``operator`` holds what ``anychip.ops`` exports and the eager short cut; ``library`` registers the
same operator with torch.library, for everything unusual; ``kernel`` and ``resolution`` find the
row; ``autograd`` and ``mutation`` keep torch's rules, ``agreement`` looks at a backward called by
hand; ``selection`` is the state, ``tally`` the record.
"""
