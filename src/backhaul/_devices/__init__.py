"""Tensors of CUDA devices: where they arrive, how their memory travels, and which stream waits for what.

Owns all that Backhaul knows of devices. Must not know calls, contexts or passes: ``_rpc`` and ``_autograd`` above carry
its messages and call it when a message leaves or arrives. A process without devices imports none of ``cuda``.

| question | module |
|---|---|
| What do ``_rpc`` and ``_autograd`` call? | ``seam``, with null objects for workers without devices |
| On which device does a tensor arrive? | ``placement`` (pure) |
| How does a tensor get into a message? | ``links`` for a peer, ``channel_link`` for a channel |
| What do the links of a worker share? | ``device_context`` |
| Who owns memory that two processes share? | ``lending``, ``borrowing``, ``shared_slots`` (both ends) |
| What do both processes see of it? | ``pages``; they tell each other ``segment_messages`` |
| When is that memory freed? | ``deferred_free``; ``process_identity`` tells ended processes |
| Who sets the flags of a killed process? | ``flag_reaper`` |
| How do workers of one process pass memory on? | ``handover`` |
| Which stream waits for what? | ``stream_order`` for messages, ``slot_order`` for slots, over ``streams`` |
| What is needed of a device? | ``backend`` (interfaces), ``cuda`` (torch and the driver) |

Device memory travels in one of three ways. Between processes of one host that see the same device it is *lent*: copied
into a slot of a segment. Between workers of one process a copy is *handed over*. Otherwise it is *staged*: copied to
the host and sent in the frame.

Segments and slots follow the protocol of ``_transport.shm.lender``, which is the same for host memory. Device memory
adds two *flags* for each slot, because the host does not wait for a device:

    sender                                        receiver
    copies a tensor into a slot, records the
    slot's *ready*; a message names the slot   -> its stream waits for *ready*; tensors are views of the slot
    (finds the slot free) its stream waits        when the last of them is gone: records *done* behind all work that
    for *done* before it writes there             may use them, and clears the slot's state
    retires the segment                        -> closes it, and says so in the pages: only then is it freed

A slot is free when its state says so, although the receiver's device may still read it. The next writer waits for
*done*, on the device.

[Note: host slots] Where two processes share a device, the device has to switch from one to the other for whatever both
do. That takes much longer than to copy a few numbers (docs/performance.md). So small slots lie in the pages themselves,
in host memory that devices read and write like their own. The host itself copies a tensor that came in such a slot and
is sent on while the device is idle.
"""
