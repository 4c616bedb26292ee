"""Tool schemas in OpenAI's format: the text that the tokenizer's merges are learnt from.

`ORDINARY` is a spread of everyday tools, so that the preamble of a tool nobody has seen is short as well.
"""

from __future__ import annotations

from typing import Any

Parameter = tuple[str, str, str]
"""(name, JSON type, description)"""

Described = tuple[str, str, list[Parameter]]
"""(name, description, parameters)"""

Tool = dict[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters": JSON schema}}"""

ORDINARY: list[Described] = [
    (
        "search_web",
        "Search the web for a query and return the best results.",
        [("query", "string", "The search query."), ("limit", "integer", "The maximum number of results.")],
    ),
    (
        "get_weather",
        "Get the current weather for a given location.",
        [("location", "string", "The name of the city."), ("unit", "string", "The unit of temperature.")],
    ),
    (
        "read_file",
        "Read the contents of a file from the disk.",
        [("path", "string", "Path to the file to read."), ("start", "integer", "The line to start from.")],
    ),
    (
        "write_file",
        "Write text to a file.",
        [("path", "string", "Path of the file."), ("content", "string", "The text to write.")],
    ),
    (
        "bash",
        "Execute a bash command and return its output.",
        [
            ("command", "string", "The command to execute."),
            ("timeout", "number", "The time limit in seconds."),
        ],
    ),
    (
        "python",
        "Run Python code in a sandbox and return what it prints.",
        [("code", "string", "The Python code to run.")],
    ),
    (
        "translate",
        "Translate text into another language.",
        [("text", "string", "The text to translate."), ("language", "string", "The target language.")],
    ),
    (
        "get_user",
        "Get information about a user by id.",
        [("user_id", "string", "The unique id of the user.")],
    ),
    (
        "list_orders",
        "List all orders of a customer.",
        [
            ("customer_id", "string", "The id of the customer."),
            ("status", "string", "Only orders with this status."),
        ],
    ),
    ("submit", "Submit an answer for evaluation.", [("answer", "string", "The submitted answer.")]),
    (
        "create_event",
        "Create a calendar event with a title and a date.",
        [("title", "string", "The title of the event."), ("date", "string", "The date, as an ISO string.")],
    ),
    (
        "delete_note",
        "Delete a note from the list of notes.",
        [("note_id", "integer", "The number of the note.")],
    ),
    (
        "convert_currency",
        "Convert an amount of money from one currency to another.",
        [("amount", "number", "The amount to convert."), ("currency", "string", "The currency code.")],
    ),
    (
        "query_database",
        "Execute a query on the database and return the matching rows.",
        [("sql", "string", "The query to execute.")],
    ),
    (
        "set_temperature",
        "Set the temperature of a room.",
        [("room", "string", "The name of the room."), ("value", "number", "The new value, in degrees.")],
    ),
    (
        "find_route",
        "Find the shortest route between two places.",
        [("origin", "string", "The place to start from."), ("destination", "string", "The place to go to.")],
    ),
    (
        "open_page",
        "Open a web page and return its text content.",
        [("url", "string", "The address of the page to open.")],
    ),
    (
        "is_open",
        "Check whether a store is open.",
        [
            ("store", "string", "The name of the store."),
            ("exact", "boolean", "Whether to match the exact name."),
        ],
    ),
    (
        "update_record",
        "Update one field of a record in the table.",
        [("id", "integer", "The id of the record."), ("data", "object", "The new values of the fields.")],
    ),
    (
        "send_message",
        "Send a message to a person or a group.",
        [
            ("recipient", "string", "Who should receive the message."),
            ("message", "string", "The message to send."),
        ],
    ),
    (
        "book_table",
        "Book a table at a restaurant.",
        [("people", "integer", "How many people will come."), ("time", "string", "The time of the booking.")],
    ),
    (
        "random_number",
        "Generate a random number in a range.",
        [("min", "integer", "The smallest number."), ("max", "integer", "The largest number.")],
    ),
    (
        "count_words",
        "Count how many words there are in a text.",
        [("text", "string", "The text in which to count.")],
    ),
    (
        "play_song",
        "Play a song by an artist on the speaker.",
        [("song", "string", "The title of the song."), ("artist", "string", "The name of the artist.")],
    ),
    (
        "schedule_job",
        "Schedule a job to run each day, week or month.",
        [("job", "string", "The name of the job."), ("every", "string", "One of day, week or month.")],
    ),
    (
        "load_image",
        "Load an image and describe what it shows.",
        [("image", "string", "The image file, for example a photo.")],
    ),
    (
        "check_spelling",
        "Check the spelling of a word and suggest a better one.",
        [("word", "string", "The word to check.")],
    ),
    (
        "list_files",
        "List the files in a directory.",
        [
            ("directory", "string", "The directory to list."),
            ("pattern", "string", "Only files that match this pattern."),
        ],
    ),
    (
        "get_news",
        "Get the latest news about a topic, company or country.",
        [("topic", "string", "The topic to look for.")],
    ),
    (
        "track_package",
        "Track a package and report where it is.",
        [("code", "string", "The tracking code, such as AB 12.")],
    ),
]


def schema(described: Described, strict: bool = False) -> Tool:
    """The OpenAI tool of a description; `strict` adds additionalProperties: false, as many clients do."""
    name, description, parameters = described
    body: dict[str, Any] = {
        "type": "object",
        "properties": {key: {"type": kind, "description": text} for key, kind, text in parameters},
        "required": [key for key, _, _ in parameters],
    }
    if strict:
        body["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "description": description, "parameters": body}}
