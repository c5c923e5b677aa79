"""How a completion comes about: one file per way, with `async run(prompt, client, sampling) -> list[Completion]`."""
