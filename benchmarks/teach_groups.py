"""Groups of ImageNet's classes that `benchmarks.teach` teaches.

A class is an index or a name of LABELS.csv. `REPORTED` are the groups of the published figures.
Animals are ranges of indices. Things are chosen by name: the result depends on the choice, so five
more lists read the same words more widely or more narrowly. `CHOICE` are groups of other classes.
Weights and rules are chosen on their pictures, which no published figure tests.
"""

from collections.abc import Mapping
from typing import Final

Group = frozenset[int | str]
Groups = Mapping[str, Group]


def _range(*bounds: tuple[int, int]) -> Group:
    return frozenset(index for first, last in bounds for index in range(first, last + 1))


def _names(text: str) -> Group:
    return frozenset(" ".join(text.split()).split(", "))


# What people call by these words: played by hand or mouth, carries people or goods, eaten, worn on
# the body, has walls and a roof.
_THINGS: Final[Groups] = {
    "instrument": _names(
        """acoustic guitar, banjo, bassoon, cello, electric guitar, flute, French horn, harp,
        marimba, ocarina, sax, steel drum"""
    ),
    "vehicle": _names(
        """airliner, beach wagon, bicycle-built-for-two, bullet train, cab, canoe, catamaran,
        container ship, fireboat, gondola, half track, jinrikisha, liner, minibus, minivan,
        motor scooter, oxcart, paddlewheel, police van, schooner, snowmobile, space shuttle,
        speedboat, steam locomotive, tow truck, tractor, tricycle, trolleybus, unicycle, yawl"""
    ),
    "food": _range((924, 969)),
    "clothing": _names(
        """academic gown, bonnet, cardigan, clog, cowboy boot, fur coat, gown, jean, jersey, kimono,
        Loafer, maillot, military uniform, mitten, running shoe, sandal, sock, sombrero, stole,
        suit, swimming trunks, Windsor tie"""
    ),
    "building": _names(
        """bell cote, birdhouse, cinema, cliff dwelling, dome, greenhouse, library, lumbermill,
        mobile home, mosque, palace, stupa, water tower"""
    ),
}


def _changed(more: Mapping[str, str], less: Mapping[str, str]) -> Groups:
    """Return the things with more names, and without others."""
    none: Group = frozenset()
    added = {group: _names(names) for group, names in more.items()}
    removed = {group: _names(names) for group, names in less.items()}
    return {
        group: (names | added.get(group, none)) - removed.get(group, none)
        for group, names in _THINGS.items()
    }


_SHOPS: Final = "barbershop, bookshop, grocery store, restaurant, shoe shop, tobacco shop"
_HEADWEAR: Final = "crash helmet, football helmet, ski mask"
_BOATS_AND_CYCLES: Final = """bicycle-built-for-two, canoe, catamaran, gondola, jinrikisha, oxcart,
    schooner, tricycle, unicycle, yawl"""

_THINGS_OTHERWISE: Final[Mapping[str, Groups]] = {
    "things, with shops": _changed({"building": _SHOPS}, {}),
    "things, motor vehicles": _changed(
        {"clothing": f"{_HEADWEAR}, Christmas stocking, feather boa"},
        {"vehicle": _BOATS_AND_CYCLES},
    ),
    "things, as in WordNet": _changed(
        {
            "instrument": "chime",
            "vehicle": "amphibian, barrow, bobsled",
            "clothing": "feather boa, ski mask",
            "building": _SHOPS,
        },
        {
            "food": "cup, hay",
            "clothing": "stole",
            "building": "birdhouse, dome, lumbermill, mobile home, water tower",
        },
    ),
    "things, narrowly": _changed(
        {},
        {
            "instrument": "ocarina, steel drum",
            "vehicle": f"{_BOATS_AND_CYCLES}, half track, liner, paddlewheel, snowmobile, "
            "space shuttle, speedboat",
            "food": "cup, hay, hot pot",
            "clothing": "bonnet, clog, cowboy boot, Loafer, mitten, running shoe, sandal, sock, "
            "sombrero, stole",
            "building": "bell cote, birdhouse, cliff dwelling, dome, water tower",
        },
    ),
    "things, broadly": _changed(
        {
            "instrument": "chime, drumstick, whistle",
            "vehicle": "amphibian, bobsled, carousel, plow, stretcher, thresher",
            "clothing": f"{_HEADWEAR}, bow, buckle, chain mail, Christmas stocking, cuirass, "
            "feather boa, hair slide, neck brace, sunglass",
            "building": f"{_SHOPS}, apiary, drilling platform, obelisk, tile roof, vault, viaduct",
        },
        {},
    ),
}

REPORTED: Final[Mapping[str, Groups]] = {
    "dog, bird, insect, reptile": {
        "dog": _range((151, 268)),
        "bird": _range((7, 24), (80, 100), (127, 146)),
        "insect": _range((300, 326)),
        "reptile": _range((33, 68)),
    },
    "cat, monkey, fish, spider, bear": {
        "cat": _range((281, 293)),
        "monkey": _range((365, 384)),
        "fish": _range((0, 6), (389, 397)),
        "spider": _range((70, 77)),
        "bear": _range((294, 297)),
    },
    "instrument, vehicle, food, clothing, building": _THINGS,
    **_THINGS_OTHERWISE,
}

_OTHERS: Final[Groups] = {
    "amphibian": _range((26, 32)),
    "sea animal": _range((108, 126), (328, 328)),
    "wild dog": _range((270, 280)),
    "rodent": _range((330, 338)),
    "ungulate": _range((340, 354)),
    "weasel": _range((298, 298), (356, 362)),
    "furniture": _names(
        """chest, cradle, crib, desk, dining table, entertainment center, four-poster,
        medicine chest, pool table, tub, wardrobe, washbasin"""
    ),
    "electronics": _names(
        """cash machine, cassette player, computer keyboard, dial telephone, digital clock,
        hand-held computer, hard disc, laptop, loudspeaker, microphone, modem, monitor,
        oscilloscope, Polaroid camera, printer, radio, tape player, typewriter keyboard"""
    ),
    "kitchen": _names(
        """beaker, beer bottle, coffee mug, Dutch oven, goblet, ladle, mortar, pot, strainer, tray,
        water bottle, wooden spoon"""
    ),
    "tool": _names(
        """ballpoint, broom, corkscrew, hatchet, iron, paintbrush, pencil sharpener, pick, plane,
        power drill, screwdriver, shovel"""
    ),
    "sport": _names(
        """balance beam, barbell, basketball, croquet ball, golf ball, horizontal bar,
        parallel bars, ping-pong ball, puck, racket, rugby ball, tennis ball, volleyball"""
    ),
    "textile": _names(
        """bath towel, fire screen, quilt, screen, shower curtain, theater curtain,
        window screen"""
    ),
    "landscape": _range((970, 980)),
    "plant": _range((984, 998)),
}

CHOICE: Final[Mapping[str, Groups]] = {
    names: {name: _OTHERS[name] for name in names.split(", ")}
    for names in (
        "sea animal, wild dog, ungulate, weasel, rodent",
        "amphibian, sea animal, ungulate, rodent",
        "wild dog, ungulate, sea animal",
        "furniture, electronics, kitchen, tool, sport",
        "landscape, plant, furniture, sport",
        "electronics, kitchen, tool, textile, plant",
        "ungulate, sport, landscape, kitchen",
        "sea animal, plant, tool, amphibian",
    )
}
