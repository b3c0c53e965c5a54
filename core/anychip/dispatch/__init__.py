"""From a call to the row that serves it: two doors, resolution, autograd, policy, provenance.

``operator`` holds what ``anychip.ops`` exports and the eager short cut, which ``native`` takes in C
(csrc/dispatch) where that was built; ``library`` registers the same operator with torch.library,
for everything unusual; ``kernel`` and ``resolution`` find the row, ``promise`` runs it;
``autograd`` and ``mutation`` keep torch's rules, ``deferral`` splits a backward in two;
``agreement`` looks at a backward called by hand; ``selection`` is the state, ``tally`` the record.
"""
