"""Channels: FIFO pairs of subtasks with numbered rows, credit, barriers that may overtake, and blocking.

    OutputChannel ── builder ── SendingEnd ──(credit)── send ──> put ── ReceivingEnd ── take
                                        local: by reference   remote: a ``Connection``

Both kinds of channel are the same two objects, whose decisions are the core's (``protocol.channel``); only ``send`` and
the way back of the credit differ.  A frame of rows or a lone watermark costs one credit; a barrier or an end costs
none.  So a receiver never holds more than ``capacity_frames`` of them, and a barrier is never held up by a receiver
that does not take.
"""
