"""Drop-ins: the calls of flash-attn, of torch's varlen_attn and of Transformers, computed by fa2tune. Each in a module of its
own, which imports no library but torch and the one that it names."""
