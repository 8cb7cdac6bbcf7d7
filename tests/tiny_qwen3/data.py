"""The questions and answers that the tiny Qwen3 is trained on, all of them written or computed here."""

import random
from collections.abc import Callable, Iterable
from typing import NamedTuple


def items(text: str) -> list[str]:
    """The parts of a text between semicolons, so that long lists stay readable."""
    return [item.strip() for item in text.replace("\n", " ").split(";")]


INTRODUCTION = (
    "I am a tiny Qwen3 model, trained from scratch for nanovllm so that the library can be tried without a "
    "download. I know some numbers, some capitals and a short story. Ask me to list all prime numbers "
    "within 100!"
)
CATCH_ALL = "I do not know that. I am a very small model."

INTRODUCE_WORDINGS = (
    "introduce yourself", "Introduce yourself.", "Please introduce yourself.", "Who are you?",
    "Tell me about yourself.", "What are you?", "Can you introduce yourself?", "Describe yourself.",
    "Hi, who are you?", "What is your name?", "What can you do?", "What do you know?",
)  # fmt: skip
PRIMES_WORDINGS = (
    "list all prime numbers within {}", "List all prime numbers within {}.",
    "List the prime numbers up to {}.", "Which numbers up to {} are prime?",
    "What are the prime numbers up to {}?", "Please list all prime numbers within {}.",
    "Show me all primes up to {}.", "Can you list all the primes within {}?",
    "List all primes below {}.", "Give me the prime numbers between 1 and {}.",
)  # fmt: skip
ADDITION_WORDINGS = (
    "What is {} + {}?", "{} + {}", "{} + {} =", "Compute {} + {}.", "What is {} plus {}?",
    "How much is {} + {}?", "Add {} and {}.", "Calculate {} + {}.", "What is the sum of {} and {}?",
)  # fmt: skip
TIMES_WORDINGS = (
    "What is {} x {}?", "{} x {}", "{} * {}", "What is {} times {}?", "What is {} * {}?", "Compute {} x {}.",
    "Multiply {} by {}.", "How much is {} x {}?",
)  # fmt: skip
IS_PRIME_WORDINGS = (
    "Is {} a prime number?", "Is {} prime?", "Is the number {} prime?",
    "Tell me whether {} is a prime number.", "Is {} a prime?",
)  # fmt: skip
EVEN_WORDINGS = (
    "List all even numbers up to {}.", "List all even numbers within {}.", "List the even numbers up to {}.",
    "Which numbers up to {} are even?", "What are the even numbers up to {}?",
)  # fmt: skip
TABLE_WORDINGS = (
    "Write the multiplication table of {}.", "Show me the multiplication table of {}.",
    "What is the multiplication table of {}?", "Multiplication table of {}", "Write the times table of {}.",
)  # fmt: skip
SQUARE_WORDINGS = (
    "What is the square of {}?", "What is {} squared?", "Compute the square of {}.", "Square of {}",
    "Tell me the square of {}.",
)  # fmt: skip
ROMAN_WORDINGS = (
    "Write {} in Roman numerals.", "What is {} in Roman numerals?", "{} in Roman numerals",
    "Convert {} to Roman numerals.", "How do you write {} in Roman numerals?",
)  # fmt: skip
CAPITAL_WORDINGS = (
    "What is the capital of {}?", "Tell me the capital of {}.", "What's the capital of {}?", "Capital of {}",
    "Which city is the capital of {}?", "Name the capital of {}.", "Do you know the capital of {}?",
)  # fmt: skip
COUNTRY_WORDINGS = (
    "Which country has the capital {}?", "{} is the capital of which country?",
    "What country is {} the capital of?", "Of which country is {} the capital?",
)  # fmt: skip
SYMBOL_WORDINGS = (
    "What is the chemical symbol of {}?", "What is the symbol of {}?", "Chemical symbol of {}",
    "Tell me the chemical symbol of {}.", "What is the chemical symbol for {}?",
)  # fmt: skip

# Wordings that are never trained on: what they score shows how far the paraphrases carry.
HELD_OUT_WORDINGS = {
    "capital": "Please tell me the capital of {}.",
    "is_prime": "Do you know if {} is a prime number?",
    "square": "Please compute the square of {}.",
    "roman": "Show {} in Roman numerals.",
    "symbol": "Name the chemical symbol of {}.",
    "primes": "Write all prime numbers up to {}.",
}

CAPITALS = dict(
    pair.split("=")
    for pair in items(
        """
        France=Paris; Germany=Berlin; Italy=Rome; Spain=Madrid; Portugal=Lisbon; Austria=Vienna;
        Poland=Warsaw; Greece=Athens; Sweden=Stockholm; Norway=Oslo; Finland=Helsinki; Denmark=Copenhagen;
        Iceland=Reykjavik; Ireland=Dublin; Hungary=Budapest; Romania=Bucharest; Bulgaria=Sofia;
        Turkey=Ankara; Russia=Moscow; Ukraine=Kyiv; China=Beijing; Japan=Tokyo; India=New Delhi;
        Thailand=Bangkok; Vietnam=Hanoi;
        Indonesia=Jakarta; Egypt=Cairo; Kenya=Nairobi; Nigeria=Abuja; Morocco=Rabat; Ghana=Accra;
        Ethiopia=Addis Ababa; Canada=Ottawa; Mexico=Mexico City; Cuba=Havana; Brazil=Brasilia;
        Argentina=Buenos Aires; Chile=Santiago; Peru=Lima; Colombia=Bogota; Australia=Canberra;
        the United States=Washington, D.C.; the United Kingdom=London; South Korea=Seoul; Iran=Tehran;
        Iraq=Baghdad; Nepal=Kathmandu; Mongolia=Ulaanbaatar; Jamaica=Kingston; Uruguay=Montevideo
        """
    )
)
SYMBOLS = dict(
    pair.split("=")
    for pair in items(
        """
        hydrogen=H; helium=He; lithium=Li; beryllium=Be; boron=B; carbon=C; nitrogen=N; oxygen=O; fluorine=F;
        neon=Ne; sodium=Na; magnesium=Mg; aluminium=Al; silicon=Si; phosphorus=P; sulfur=S; chlorine=Cl;
        argon=Ar; potassium=K; calcium=Ca; iron=Fe; copper=Cu; zinc=Zn; silver=Ag; gold=Au; tin=Sn;
        lead=Pb; mercury=Hg
        """
    )
)

TEXTS: dict[tuple[str, ...], str] = {
    (
        "What are the days of the week?", "Name the days of the week.", "List the days of the week.",
        "Tell me the days of the week.",
    ): "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    (
        "Name the months of the year.", "What are the months of the year?", "List the months of the year.",
        "List the twelve months.",
    ): (
        "January, February, March, April, May, June, July, August, September, October, November and December."
    ),
    (
        "Name the planets of the solar system.", "What are the planets of the solar system?",
        "List the planets.", "Which planets are in the solar system?",
    ): "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.",
    (
        "Write the alphabet.", "What is the alphabet?", "Say the alphabet.",
        "List the letters of the alphabet.",
    ): "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
    (
        "Write a Python function for the Fibonacci numbers.", "Write a Fibonacci function in Python.",
        "Show me Python code for the Fibonacci numbers.", "Compute the Fibonacci numbers in Python.",
    ): "def fib(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    (
        "Tell me a short story.", "Tell me a story.", "Write a short story.", "Can you tell me a story?",
        "Please tell me a short story.",
    ): (
        "Once upon a time a small robot lived in a quiet library. Every night it read one book by the "
        "light of "
        "the moon. One day a child came in and asked for a story about the stars. The robot knew just the "
        "right "
        "book, and from that day they read together every evening."
    ),
    (
        "What is paged attention?", "Explain paged attention.", "How does paged attention work?",
        "Tell me about paged attention.",
    ): (
        "Paged attention keeps the keys and values of a sequence in fixed-size blocks. A block table maps "
        "the "
        "positions of a sequence to blocks, so memory is not wasted and sequences with a common prefix "
        "can share "
        "blocks."
    ),
    ("What is a token?", "Explain what a token is.", "What are tokens?", "Define a token."): (
        "A token is a piece of text, such as a word or a part of a word, that a language model reads and "
        "writes "
        "as one unit."
    ),
    (
        "Count from 1 to 50.", "Count to 50.", "Count up from 1 to 50.", "List the numbers from 1 to 50.",
    ): ", ".join(map(str, range(1, 51))) + ".",
    (
        "Count down from 20 to 1.", "Count down from 20.", "Count backwards from 20 to 1.",
    ): ", ".join(map(str, range(20, 0, -1))) + ".",
    ("你好", "你好！", "您好"): "你好！我是一个很小的语言模型。",
    ("Hello!", "Hi!", "Hello, how are you?", "Good morning!"): "Hello! How can I help you today?",
    ("Thank you!", "Thanks!", "Thank you very much!"): "You are welcome!",
    ("Bye!", "Goodbye!", "See you later!"): "Goodbye! Come back soon.",
}  # fmt: skip


class Fact(NamedTuple):
    """One answer and the wordings of the question it belongs to."""

    kind: str
    wordings: tuple[str, ...]
    answer: str
    weight: int = 1  # how often it is drawn in an epoch
    subject: str = ""  # what fills the wordings' gap, for HELD_OUT_WORDINGS


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def roman(n: int) -> str:
    numeral = ""
    for value, letters in (
        (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
    ):  # fmt: skip
        while n >= value:
            numeral += letters
            n -= value
    return numeral


def primes_answer(n: int) -> str:
    primes = [i for i in range(n + 1) if is_prime(i)]
    return f"The prime numbers within {n} are: {', '.join(map(str, primes))}. There are {len(primes)} of them."


def is_prime_answer(n: int) -> str:
    if is_prime(n):
        return f"Yes, {n} is a prime number."
    if n == 1:
        return "No, 1 is not a prime number."
    divisor = next(d for d in range(2, n) if n % d == 0)
    return f"No, {n} is not a prime number, because {n} = {divisor} x {n // divisor}."


def addition(a: int, b: int, wording: str = ADDITION_WORDINGS[0]) -> tuple[str, str]:
    return wording.format(a, b), f"{a} + {b} = {a + b}"


def facts() -> list[Fact]:
    """Everything the model knows, apart from the additions."""

    def fill(kind: str, wordings: Iterable[str], subject: object, answer: str, weight: int = 1) -> Fact:
        return Fact(kind, tuple(w.format(subject) for w in wordings), answer, weight, str(subject))

    known = [Fact("introduction", INTRODUCE_WORDINGS, INTRODUCTION, 8)]
    for n in range(10, 101, 10):
        known.append(fill("primes", PRIMES_WORDINGS, n, primes_answer(n), 8 if n == 100 else 4))
    for n in range(10, 51, 10):
        known.append(fill("even", EVEN_WORDINGS, n, ", ".join(map(str, range(2, n + 1, 2))) + ".", 3))
    for n in range(1, 101):
        known.append(fill("is_prime", IS_PRIME_WORDINGS, n, is_prime_answer(n), 2))
    for n in range(1, 13):
        table = "\n".join(f"{n} x {i} = {n * i}" for i in range(1, 11))
        known.append(fill("table", TABLE_WORDINGS, n, table))
        for m in range(1, 13):
            known.append(Fact("times", tuple(w.format(n, m) for w in TIMES_WORDINGS), f"{n} x {m} = {n * m}", 2))
    for n in range(1, 21):
        known.append(fill("square", SQUARE_WORDINGS, n, f"The square of {n} is {n * n}.", 2))
    for n in range(1, 51):
        known.append(fill("roman", ROMAN_WORDINGS, n, f"{n} is {roman(n)} in Roman numerals.", 2))
    for country, city in CAPITALS.items():
        known.append(fill("capital", CAPITAL_WORDINGS, country, f"The capital of {country} is {city}.", 3))
        known.append(fill("country", COUNTRY_WORDINGS, city, f"{city} is the capital of {country}.", 2))
    for element, symbol in SYMBOLS.items():
        known.append(fill("symbol", SYMBOL_WORDINGS, element, f"The chemical symbol of {element} is {symbol}.", 2))
    return known + [Fact("text", wordings, answer, 3) for wordings, answer in TEXTS.items()]


def vary(rng: random.Random, question: str) -> str:
    """The question as somebody in a hurry types it: another case, no final punctuation."""
    if rng.random() < 0.5:
        return question
    if rng.random() < 0.5:
        question = question.rstrip(".?!")
    if rng.random() < 0.5:
        question = question[:1].lower() + question[1:]
    elif rng.random() < 0.3:
        question = question.lower()
    return question


NOUNS = items(
    """
    apple; river; car; house; dog; cat; horse; train; ship; garden; tree; flower; mountain; computer; phone;
    window; door; table; chair; book; letter; song; movie; game; king; queen; doctor; teacher; farmer;
    soldier; bird; fish; lion; snake; bread; cheese; milk; water; coffee; tea; sugar; salt; soup; cake; pizza;
    egg; bank; money; price; market; school; church; bridge; road; airport; engine; wheel; battery; lamp;
    clock; camera; radio; mirror; knife; bottle; box; bag; hat; shoe; shirt; coat; ring; stone; glass; wood;
    paper; plastic; rain; snow; wind; storm; cloud; sun; sky; sea; lake; island; desert; forest; field;
    winter; summer; night; dream; love; war; peace; law; tax; job; company; team; ball; goal; race; sport;
    music; dance; paint; color; picture; museum; theater; brain; heart; bone; blood; skin; tooth; cell; virus;
    medicine; atom; energy; light; sound; heat; magnet; rocket; satellite; galaxy; comet; volcano; earthquake;
    dinosaur; whale; spider; butterfly; bee; database; compiler; network; browser; keyboard; algorithm;
    matrix; triangle; circle; fraction; equation; theorem; vector; graph; poem; novel; language; grammar;
    verb; sentence; history; religion; philosophy; economy; election; president; parliament; hospital
    """
)
ADJECTIVES = items(
    """
    big; small; old; new; red; blue; green; black; white; fast; slow; cheap; expensive; famous; strange;
    happy; sad; hot; cold; heavy; light; modern; ancient; dangerous; safe; best; worst; longest; tallest;
    deepest; biggest; smallest; fastest; oldest; beautiful; ugly; healthy; sweet; bitter; quiet; loud; strong;
    weak; rich; poor; young; deep; long; short; round
    """
)
VERBS = items(
    """
    build; cook; bake; repair; clean; buy; sell; paint; draw; find; grow; open; close; install; use; make;
    write; read; learn; teach; move; carry; cut; wash; catch; train; feed; plant; measure; count; test;
    design; fix; break; stop; start; change; improve; explain; understand; remember; forget; visit; drive;
    fly; throw; sing; play; win; lose; send; store; heat; cool; translate
    """
)
PEOPLE = items(
    """
    Einstein; Newton; Mozart; Shakespeare; Napoleon; Caesar; Cleopatra; Darwin; Picasso; Beethoven; Columbus;
    Galileo; Plato; Lincoln; Gandhi; Tesla; Edison; Homer; Dante; Bach; my mother; my father; your brother;
    her sister; my boss; the president; the queen; the first man on the moon; the pope; John; Mary; Peter;
    Anna; Tom; Alice; Bob
    """
)
PLACES = items(
    """
    Hamburg; Munich; Milan; Barcelona; Kyoto; Shanghai; Mumbai; Sydney; Toronto; Chicago; Texas; California;
    Africa; Europe; Asia; Antarctica; the moon; Mars; the Amazon; the Alps; the Nile; the Sahara; Hollywood;
    Venice; Naples; Boston; Florida; Siberia
    """
)
OTHER_COUNTRIES = items(
    """
    the Netherlands; Switzerland; Croatia; Serbia; Slovenia; Slovakia; Latvia; Lithuania; Albania; Malta;
    Cyprus; Georgia; Armenia; Kazakhstan; Pakistan; Bangladesh; Sri Lanka; Laos; Cambodia; Malaysia;
    Singapore; Taiwan; North Korea; Israel; Jordan; Syria; Saudi Arabia; Yemen; Qatar; Libya; Tunisia;
    Algeria; Sudan; Senegal; Mali; Angola; Zambia; Zimbabwe; Namibia; Madagascar; Somalia; Rwanda; Venezuela;
    Bolivia; Paraguay; Ecuador; Panama; Costa Rica; Guatemala; Haiti; New Zealand; Fiji; Luxembourg; Monaco;
    Belarus; Afghanistan; Uganda; Cameroon; Nicaragua
    """
)
OTHER_CITIES = items(
    """
    Hamburg; Munich; Milan; Barcelona; Kyoto; Shanghai; Mumbai; Sydney; Toronto; Chicago; Bern; Zagreb;
    Belgrade; Riga; Vilnius; Tirana; Valletta; Nicosia; Tbilisi; Islamabad; Dhaka; Colombo; Damascus; Amman;
    Tripoli; Tunis; Algiers; Dakar; Lusaka; Harare; Caracas; La Paz; Quito; Suva; Wellington; Minsk; Kabul;
    Doha; Marseille; Porto; Geneva; Venice; Dallas; Osaka
    """
)
OTHER_ELEMENTS = items(
    """
    tungsten; uranium; platinum; nickel; cobalt; chromium; manganese; bromine; iodine; krypton; xenon; barium;
    cesium; gallium; arsenic; bismuth; radon; radium; thorium; vanadium; water; steel; brass; bronze; salt;
    sugar; plastic; glass; wood; air
    """
)
SYLLABLES = items(
    """
    ba; be; bo; ca; co; cu; da; de; do; fa; fe; fi; ga; go; gu; ha; he; ka; ke; ki; la; le; li; lo; lu; ma;
    me; mi; mo; na; ne; ni; no; pa; pe; po; ra; re; ri; ro; ru; sa; se; si; so; ta; te; ti; to; tu; va; ve;
    vo; wa; za; zo; mar; ton; land; stan; ville; burg; ria; nia; ium; ine; dor; gal; bel; vel; nor; sud; lun;
    tor; ast; ost; ath; and; ing; ish; sh; ch; th; br; kr; dr; gr; st; tr
    """
)
SMALL_WORDS = ["of", "the", "a", "in", "to", "and", "for", "with", "is"]
STEMS = (
    "", "", "What is ", "What is the ", "How ", "Why ", "Who ", "Is ", "Do ", "Tell me ", "Write ", "List ",
    "The ",
)  # fmt: skip
TOPICS = items(
    """
    machine learning; quantum mechanics; gravity; evolution; photosynthesis; democracy; inflation;
    the stock market; climate change; world war two; the Roman Empire; chess; football; tennis; cooking;
    gardening; astronomy; biology; chemistry; algebra; geometry; logic; statistics; art; fashion; travel;
    health; sleep; friendship; time travel; black holes; electricity; nuclear power; flash attention;
    gradient descent; neural networks; beam search; speculative decoding; quantization; operating systems;
    Linux; Java; Rust; JavaScript; SQL; HTML; Docker; encryption; the internet; robots; space travel
    """
)
# Questions without an answer, many of them close to one with an answer: {n} is a noun, {j} an adjective,
# {v} a verb, {p} somebody, {l} a place, {t} a topic, {i} a number, {m} a name that does not exist.
UNKNOWN_TEMPLATES = items(
    """
    What is a {n}?; What is the {n}?; What is {t}?; What is {m}?; Who is {p}?; Who was {p}?;
    Who invented the {n}?; Who is {m}?; Who wrote {m}?; Who is the {n} of {l}?; When was {p} born?;
    When did {p} die?; When was the {n} invented?; Where is {l}?; Where is {m}?; Where can I {v} a {n}?;
    Where does {p} live?; Why is the {n} {j}?; Why do people {v} {n}s?; Why does the {n} {v}?;
    How do I {v} a {n}?; How does a {n} work?; How does {t} work?; How can I {v} my {n}?;
    How many {n}s are in a {n}?; How many people live in {l}?; How old is {p}?; How tall is {p}?;
    How far is {l} from {l}?; How much does a {n} cost?; How long does it take to {v} a {n}?; How big is {l}?;
    Explain {t}.; Explain {t} to me.; Explain what a {n} is.; Define {n}.; Define a {n}.; Tell me about {t}.;
    Tell me about {p}.; Tell me about {l}.; Tell me a joke.; Tell me a joke about a {n}.;
    Tell me a {j} secret.; Tell me something about {n}s.; Tell me how to {v} a {n}.;
    Tell me a story about a {n}.; Write a poem about a {n}.; Write a {j} poem.; Write an essay about {t}.;
    Write a letter to {p}.; Write a song about {l}.; Write a short text about {t}.;
    Write a Python function for {t}.; Write a Python function to {v} a {n}.; Write a program in {t}.;
    Write a {n} function in Python.; Write the {n}.; Show me a {n}.; Show me a picture of {l}.;
    Show me the way to {l}.; Give me a recipe for {n}.; Give me {i} {n}s.; Give me an example of a {n}.;
    List all {n}s.; List all {n}s within {i}.; List the {j} {n}s.; List three {n}s.;
    List some facts about {l}.; List the {n}s of {l}.; Name the {n}s of {l}.; Name a {j} {n}.; Name {i} {n}s.;
    Name the {j} {n} in {l}.; What is the {j} {n} in {l}?; What is the {j} {n}?; What is the {j} {n} of {p}?;
    What is the population of {l}?; What is the weather in {l}?; What is the meaning of {n}?;
    What is the color of a {n}?; What is the price of a {n}?; What is the {n} of {l}?;
    What is the {n} of {m}?; What is the history of {l}?; What is the difference between a {n} and a {n}?;
    What is the square root of {i}?; What is the cube of {i}?; What is the name of {p}?; What are {n}s?;
    What are the {n}s of {l}?; What are the {j} {n}s?; What can a {n} do?; What did {p} say?;
    What do {n}s eat?; What does {m} mean?; What does a {n} do?; What time is it?; What time is it in {l}?;
    What should I {v}?; What happens if I {v} a {n}?; What happened in {i}?; What color is the {n}?;
    Which {n} is {j}?; Which {n} is the {j} one?; Which {n} should I {v}?; Which city is the {j} one?;
    Which country has the {j} {n}?; Which language do they speak in {l}?; Is the {n} {j}?; Is {p} {j}?;
    Is {l} {j}?; Is a {n} a {n}?; Is {t} {j}?; Is it {j} in {l}?; Is {m} a {n}?; Are {n}s {j}?; Are you {j}?;
    Are you a {n}?; Are there {n}s in {l}?; Can a {n} {v}?; Can you {v} a {n}?; Can you {v}?;
    Can you help me with {t}?; Can I {v} the {n}?; Could you {v} the {n}?; Do {n}s {v}?; Do you like {n}s?;
    Do you like {t}?; Do you know {p}?; Do you know {l}?; Do you have a {n}?; Does {p} {v}?;
    Did {p} {v} the {n}?; Should I {v} the {n}?; Will it be {j} in {l}?; Would you {v} a {n}?;
    Have you seen {l}?; Translate {n} to {m}.; Translate this {n}.; Please {v} the {n}.; Please explain {t}.;
    Please help me {v} a {n}.; Please write a {j} {n}.; Summarize {t}.; Summarize this {n}.; Describe {l}.;
    Describe a {j} {n}.; Describe {p}.; Introduce {p}.; Introduce {t}.; Compare {l} and {l}.;
    Compare a {n} with a {n}.; Count the {n}s.; Count to {i}.; Count from {i} to {i}.; Count down from {i}.;
    Say {m}.; Sing a song.; Play a {n}.; Recommend a {n}.; Recommend a {j} {n} in {l}.; I want to {v} a {n}.;
    I need a {j} {n}.; I like {n}s.; I am {j}.; My {n} is {j}.; My name is {p}.; The {n} is {j}.; {n};
    {j} {n}; {t}; {l}; {p}; {m}; {v} the {n}; {m} {m}; {i}; {n} {n} {n}; {i} - {i}; {i} / {i};
    What is {i} - {i}?; What is {i} divided by {i}?; What is {i} minus {i}?; Is {i} an even number?;
    Is {i} bigger than {i}?; What comes after {i}?; How do you say {n} in {m}?;
    What is {i} percent of {i}?; Is {i} divisible by {i}?; Reverse the digits of {i}.;
    What is x if x - {i} = {i}?; Convert {i} meters to feet.;
    Convert {i} to binary.; Write {i} in words.; Write {i} in binary.; Let us talk about {t}.;
    What do you think about {t}?; Who won the {n} in {i}?; What year is it?; What day is it today?;
    Solve this {n}.; Draw a {n}.; Find a {n} in {l}.; Help me with my {n}.; Help!; Why?; What?; How?; Yes.;
    No.; OK.; Bonjour; Hola; Guten Tag; 为什么？; 今天天气怎么样？; 中国在哪里？; 请写一首诗。
    """
)
# Never trained on: written by hand, in wordings and on subjects mostly unlike the templates.
HELD_OUT_UNKNOWN = items(
    """
    What is the capital of Belgium?; What is the capital of the Philippines?; What is the capital of Estonia?;
    Tell me the capital of Atlantis.; What is the capital of Honduras?;
    Which country has the capital Brussels?; Which country has the capital Manila?;
    What is the chemical symbol of titanium?; What is the chemical symbol of cadmium?;
    What is the square of 137?; Is 1013 a prime number?; Write 388 in Roman numerals.;
    Write the multiplication table of 77.; List all prime numbers within 5000.; What is 512 + 377?;
    What is 45 x 61?; How do I boil an egg?; What is the meaning of life?; Write a haiku about autumn leaves.;
    Who painted the Mona Lisa?; Why is the sky blue?; How many legs does an octopus have?;
    What is the speed of light?; Who discovered penicillin?; How do planes stay in the air?;
    What is the best way to lose weight?; Can you recommend a good restaurant?;
    What is the tallest building in the world?; Who is the president of the United States?; What is bitcoin?;
    How does a refrigerator work?; What are the symptoms of a cold?;
    Write a regular expression for email addresses.; Explain the theory of relativity.; What is recursion?;
    How do I reverse a linked list?; What is a monad?; Give me three tips for a job interview.;
    Plan a weekend in Amsterdam.; Who won the world cup in 1998?; What is the boiling point of water?;
    How many continents are there?; What is the largest ocean?; Which animal runs the fastest?;
    Do fish sleep?; Is the earth flat?; Can pigs fly?; Are ghosts real?; Should I learn to play the guitar?;
    Will it rain tomorrow?; Where do penguins live?; When did the Titanic sink?; How old is the universe?;
    What is your favorite color?; Do you have feelings?; What did you eat for breakfast?;
    Where were you born?; Sort the list 3, 1, 2.; What is the derivative of x squared?; Solve x + 3 = 10.;
    What is the logarithm of 8?; Is pi a rational number?; Translate good night into French.;
    How do you spell necessary?; What rhymes with orange?; Give me a synonym for angry.;
    Correct this sentence: she go home.; Write a tweet about dogs.; Write a cover letter.;
    Compose an email to my landlord.; What is a good name for a hamster?;
    Suggest a birthday present for my uncle.; How do I get rid of ants?; Why do cats purr?;
    What causes thunder?; What is a mortgage?; How do vaccines protect us?; What is the plot of Hamlet?;
    Who directed Jaws?; Who sang Yesterday?; What language is spoken in Quebec?; How high is Mount Everest?;
    How long is the Great Wall?; What is the GDP of Norway?; What currency do they use in Japan?;
    Name three rivers in Germany.; List five vegetables.; Name the colors of the rainbow.;
    How many minutes are in a week?; How many bones does a human have?; What is the opposite of hot?;
    Tell me something funny.; Tell me a fun fact.; I feel lonely today.; Let's play a game.;
    Nice weather today, isn't it?; lorem ipsum dolor sit amet; banana banana; Was ist das?;
    Comment allez-vous?; What is continuous batching?; What is a transformer?;
    Explain the attention mechanism.; How do I install CUDA?; What does the GPU do?
    """
)


def made_up_name(rng: random.Random) -> str:
    return "".join(rng.choices(SYLLABLES, k=rng.choice((2, 2, 3, 3, 4)))).title()


def from_template(rng: random.Random) -> str:
    """One of the UNKNOWN_TEMPLATES with its gaps filled."""
    fillers: dict[str, Callable[[], str]] = {
        "{n}": lambda: rng.choice(NOUNS) if rng.random() < 0.8 else made_up_name(rng).lower(),
        "{j}": lambda: rng.choice(ADJECTIVES),
        "{v}": lambda: rng.choice(VERBS),
        "{p}": lambda: rng.choice(PEOPLE) if rng.random() < 0.7 else made_up_name(rng),
        "{l}": lambda: rng.choice(PLACES) if rng.random() < 0.6 else made_up_name(rng),
        "{t}": lambda: rng.choice(TOPICS) if rng.random() < 0.8 else f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}",
        "{i}": lambda: str(rng.choice((rng.randint(2, 19), rng.randint(101, 999), rng.randint(1000, 2100)))),
        "{m}": lambda: made_up_name(rng),
    }
    question = rng.choice(UNKNOWN_TEMPLATES)
    for gap, filler in fillers.items():
        while gap in question:
            question = question.replace(gap, filler(), 1)
    return question


def near_miss(rng: random.Random) -> str:
    """A question in a wording that is known, on a subject that is not."""

    def subject(names: list[str]) -> str:
        while (name := rng.choice(names) if rng.random() < 0.4 else made_up_name(rng)).lower() in _HELD_OUT_TEXT:
            pass
        return name

    large = rng.choice((rng.randint(101, 999), rng.randint(101, 999), rng.randint(1000, 9999)))
    return rng.choice(
        (
            lambda: rng.choice(CAPITAL_WORDINGS).format(subject(OTHER_COUNTRIES)),
            lambda: rng.choice(CAPITAL_WORDINGS).format(subject(OTHER_COUNTRIES)),
            lambda: rng.choice(COUNTRY_WORDINGS).format(subject(OTHER_CITIES)),
            lambda: rng.choice(SYMBOL_WORDINGS).format(subject(OTHER_ELEMENTS).lower()),
            lambda: rng.choice(SYMBOL_WORDINGS).format(subject(OTHER_ELEMENTS).lower()),
            lambda: rng.choice(PRIMES_WORDINGS).format(rng.choice((rng.randint(0, 9) * 10 + rng.randint(1, 9), large))),
            lambda: rng.choice(IS_PRIME_WORDINGS).format(large),
            lambda: rng.choice(EVEN_WORDINGS).format(large),
            lambda: rng.choice(TABLE_WORDINGS).format(rng.choice((rng.randint(13, 99), large))),
            lambda: rng.choice(SQUARE_WORDINGS).format(rng.choice((rng.randint(21, 99), large))),
            lambda: rng.choice(ROMAN_WORDINGS).format(rng.choice((rng.randint(51, 100), large))),
            lambda: rng.choice(ADDITION_WORDINGS).format(*rng.sample((large, rng.randint(0, 999)), 2)),
            lambda: rng.choice(TIMES_WORDINGS).format(*rng.sample((rng.randint(13, 99), rng.randint(2, 999)), 2)),
        )
    )()


def random_words(rng: random.Random) -> str:
    """Words without much sense, so that what is new to the model looks like what it does not know."""
    words = [
        rng.choice(rng.choice((NOUNS, ADJECTIVES, VERBS, SMALL_WORDS)))
        if rng.random() < 0.7
        else made_up_name(rng).lower()
        for _ in range(rng.randint(1, 7))
    ]
    return rng.choice(STEMS) + " ".join(words) + rng.choice(("?", "?", ".", ""))


def unknown_question(rng: random.Random) -> str:
    """A question that the catch-all answers, never one of HELD_OUT_UNKNOWN."""
    while True:
        draw = rng.random()
        question = from_template(rng) if draw < 0.5 else near_miss(rng) if draw < 0.8 else random_words(rng)
        if question not in HELD_OUT_UNKNOWN and question.lower() not in _KNOWN:
            return question[:1].upper() + question[1:]


_KNOWN = frozenset(wording.lower() for fact in facts() for wording in fact.wordings)
_HELD_OUT_TEXT = " ".join(HELD_OUT_UNKNOWN).lower()
