"""How a completion comes about: one file per way, each with `async run(prompt, client, sampling) -> list[Completion]`."""
