"""The words from which `tiny_corpus` builds its tasks: one list a subject.

The lists are large enough that a sentence seen in training is rarely seen again, and small enough that a
vocabulary of about a thousand byte pairs spells most of them in one or two tokens.
"""


def _words(text: str, separator: str | None = None) -> list[str]:
    """The words of a text, or its phrases when a separator stands between them (line breaks may be anywhere)."""
    return [" ".join(part.split()) for part in text.split(separator)]


NAMES = _words(
    """Ada Adam Aisha Alan Alice Amara Amir Ana Anders Anita Anton Aria Ben Bella Bruno Carla Carlos Cedric
    Chen Clara Cora Dana Daniel Dario David Diana Dora Edgar Elena Eli Ella Emil Emma Erik Esther Eva Farid
    Felix Fiona Frank Freya Gloria Grace Greta Hana Hanna Hugo Ida Igor Ines Ira Iris Ivan Jack Jana Jens
    Joel Jonas Julia Kamal Karen Karl Kate Kenji Kira Lara Lars Laura Lena Leo Lila Lina Lou Lucas Lucy
    Magda Maja Malik Marco Maria Martin Max Maya Mia Mila Milo Mina Nadia Nico Nina Noah Nora Olga Oliver
    Omar Oscar Otto Paula Pedro Petra Pia Priya Rafael Ravi Rita Robin Rosa Ruben Ruth Sam Samir Sara Selma
    Simon Sofia Stella Sven Tara Theo Tina Tom Toni Uma Vera Victor Viola Walter Wanda Yara Yuki Zara Zoe"""
)

OBJECTS = _words(
    """apples badges balls bananas baskets beads bells books bottles bowls boxes bricks brushes buckets buttons
    cakes candles cards carrots chairs coins cookies cups dolls drums eggs envelopes erasers feathers flags
    flowers forks glasses gloves grapes hats jars keys kites lamps leaves lemons letters magnets maps
    marbles masks mugs muffins nails nuts olives onions oranges paints pears pebbles pencils pens pictures
    pies pins plants plates plums postcards pots puzzles ribbons rings robots rocks ropes roses scarves
    seeds shells shirts shoes socks spoons stamps stars stickers stones straws tickets tiles tomatoes towels
    toys trains trees tulips wheels whistles"""
)

ANIMALS = _words(
    """ant badger bat bear beaver bee camel cat cow crab crow deer dog dolphin donkey duck eagle falcon fox
    frog goat goose hare hawk hen horse koala lamb lion lizard llama mole monkey moose mouse otter owl panda
    parrot pig pony rabbit raven seal shark sheep snail snake spider swan tiger toad turtle whale wolf zebra"""
)

COLOURS = _words("""amber black blue brown gold gray green orange pink purple red silver white yellow""")

CITIES = _words(
    """Athens Berlin Bern Bogota Boston Cairo Chicago Dakar Delhi Denver Dublin Geneva Hanoi Havana Helsinki
    Jakarta Kyoto Lagos Lima Lisbon London Madrid Malmo Manila Milan Nairobi Oslo Ottawa Paris Porto Prague
    Quito Riga Rome Seattle Seoul Sofia Sydney Tallinn Tokyo Toronto Tunis Turin Vienna Warsaw Zurich"""
)

JOBS = _words(
    """actor artist baker barber carpenter chef clerk dancer dentist doctor driver editor engineer farmer
    gardener judge lawyer librarian mechanic miner nurse painter pilot plumber poet sailor singer tailor
    teacher waiter writer"""
)

HOBBIES = _words(
    """archery baking ballet boxing camping chess cooking cycling dancing diving drawing fishing gardening golf
    hiking judo juggling karate knitting music painting photography pottery reading rowing running sailing
    sewing singing skating skiing surfing swimming tennis theatre travel writing yoga"""
)

ACTIVITIES = _words(
    """breakfast|lunch|dinner|a walk|the dentist|a meeting|the gym|piano practice|a haircut|homework|the
    library|a phone call|the market|a film|tea with friends|a swim|the bus home|a maths lesson|football
    practice|the laundry|a visit to the museum|a short nap|the school play|a bike ride|a cooking class""",
    "|",
)

ADJECTIVES = _words(
    """brave bright calm careful cheerful clever curious fast funny gentle happy hungry kind lazy little lonely
    loud lucky noisy old patient polite proud quick quiet shy silly sleepy slow small strong tall tiny wise
    young"""
)

PLACES = _words(
    """attic barn bakery beach bridge castle cave cellar desert farm field forest garden harbour hill island
    kitchen lake library market meadow mill mountain museum park pond river school station tower valley
    village"""
)

TREASURES = _words(
    """a map|an old coin|a silver key|a red kite|a lost letter|a small drum|a glass bead|a golden ring|a blue
    feather|a broken clock|a warm scarf|a paper boat|a wooden box|a green stone|a strange shell|a tiny bell""",
    "|",
)

VERBS = _words(
    """build carry check clean close collect count cover draw feed fill find fix fold gather guard hide hold
    lift load mark measure mix move open pack paint pick plant pull push repair send sort stack store sweep
    tie wash weigh wrap"""
)

SYLLABLES = _words(
    """ba be bo da de di do fa fe ga go ka ke ki la le li lo ma me mi mo na ne ni ra re ri ro sa se ta ti to va
    ve"""
)
