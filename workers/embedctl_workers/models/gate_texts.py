"""The texts that every backend is measured on. A change of any text invalidates every cached reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: The prompt of the gate's check with a prompt.
PROMPT = "query: "
#: The name of the text by which a worker tells whether it still computes what it did. Of ordinary length: a worker must
#: be able to encode it even if it lacks the memory for longer texts.
KNOWN_GOOD = "sentence"

_ESSAY = """\
The harbour master kept two ledgers. In the first he wrote what came in: the name of the ship, her flag, her draught
at the bow and at the stern, and the hour at which the pilot had stepped aboard. In the second he wrote what he
thought of her, and that one he never showed to anybody. When the two were found in the attic of the customs house,
eighty years later, the historian who read them side by side noticed that they disagreed about the weather. It had
rained, said the first, on the fourth of March; a clear cold morning, said the second, with ice on the mooring lines.
She spent a winter on that single day. The lighthouse log spoke of fog. A letter from the schoolteacher, which smelled
of camphor and had been folded into a hymn book, mentioned neither rain nor fog nor ice but a funeral, and the mud on
everybody's boots. A newspaper from the next town had printed a table of temperatures, and it was there that the
answer stood, in small type, below the price of barley: the thermometer on the quay had been broken since February,
and somebody had been making up the figures. Once she knew that, the rest was easy to see. The clerk who filled in the
first ledger copied the weather from the newspaper, the newspaper had it from the clerk, and between them they had
invented a spring. Only the second ledger had been written by a man who looked out of the window. She wrote an article
of nine pages about it, which was read by eleven people, one of whom repaired measuring instruments for a living. He
sent her a parcel. In it lay a brass tube with a cracked glass, a label in faded violet ink, and a note: it was sold
to my grandfather as broken, it said, but there is nothing wrong with it except that the scale was put in upside down.
So the figures had not been invented after all. They had been read, faithfully, every morning at eight, by somebody
who never wondered why it grew colder towards summer. She laughed until the librarian came to look. Then she took the
table from the newspaper and turned it around, line by line, and there was the rain on the fourth of March, there was
the thaw in April, there was the heat of which the schoolteacher complained in every letter of that July. What
remained was the ice on the mooring lines. She read the second ledger once more from the beginning, slowly, as one
reads a person and not a source, and it was only then that she understood what the harbour master had been doing in
all those pages. He described the ships as they would be. A schooner that had come in with fresh paint he called a
wreck, and within two years she was one; a captain of whom the whole town spoke well he called a thief, and the court
agreed with him, in time. He was not keeping a record of the day. He was guessing, in secret, and going back
afterwards to mark with a small cross in the margin every guess that had come true. Beside the clear cold morning of
the fourth of March there was no cross. He had foreseen frost, it had rained, and he had let the mistake stand,
because a ledger of guesses is worth nothing without those that were wrong.
"""
_WORDS = _ESSAY.split()

#: Name → text: lengths from one character to more than 512 tokens, and scripts that tokenizers treat differently.
TEXTS: Mapping[str, str] = {
    "nearly empty": ".",
    "one word": "harbour",
    "two words": "Blue heron",
    "title": "Minutes of the third meeting",
    "question": "Why does bread rise higher when the dough is left to rest overnight?",
    "sentence": "The last train leaves at nine, so we will have to run if we want to see the end of the play.",
    "German": "Übermütige Bäcker süßen große Brötchen, während der Fluss über die Straße tritt.",
    "Polish and French": "Zażółć gęślą jaźń – où est passé le cœur de la forêt, à l'été déjà ?",
    "Vietnamese": "Mưa rơi suốt đêm trên những mái nhà cũ ở ven sông.",
    "Chinese": "昨天下午我们在图书馆找到了一本关于海洋的旧书。",
    "Japanese": "駅前のパン屋は、朝の六時から焼きたてのカレーパンを売っています。",
    "Korean": "할머니는 가을마다 마당에서 붉은 고추를 말리셨다.",
    "Cyrillic and Greek": "Снег шёл всю ночь, и к утру дорога исчезла. Ήρεμη ήταν η θάλασσα.",
    "Arabic": "كتب المهندس رسالة طويلة عن الجسر القديم فوق النهر.",
    "Hebrew": "הספר הישן נמצא על המדף העליון ליד החלון.",
    "Devanagari": "बारिश के बाद गाँव की सड़क पर बच्चे नाव चला रहे थे।",
    "Thai": "แม่ค้าขายมะม่วงสุกอยู่ริมคลองทุกเช้า",
    "emoji": "Great news 🎉🎉 the cat 🐈\u200d⬛ came home! 👩🏽\u200d🚀 → ½ ™ ﬁ",
    "digits": "3.14159 -7e-3 1,234,567.89 2026-11-21T07:30:32Z 0x1F 192.168.0.1 +49 30 901820",
    "code": "def area(r: float) -> float:\n\treturn 3.14159 * r ** 2  # TODO: math.pi\n\n\nprint(area(2.0))\n",
    "markup": '<a href="https://example.org/a?b=c&d=%20#e">[CLS] it\'s **bold** [SEP]</a> <s>no</s> [MASK]',
    "white space": "  LEADING and\ttrailing \r\n\n blanks, UPPER and lower\u00a0case  ",
    "one long word": "donaudampfschifffahrtsgesellschaftskapitän" * 2,
    "64 tokens": " ".join(_WORDS[:52]),
    "128 tokens": " ".join(_WORDS[52:158]),
    "256 tokens": " ".join(_WORDS[158:368]),
    "over-long": _ESSAY,
}


def gate_texts() -> Sequence[str]:
    """The texts, in the order of the rows of :func:`~embedctl_workers.models.references.references_for`."""
    return list(TEXTS.values())
