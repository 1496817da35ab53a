"""Colour tables for heat maps, under matplotlib's names and with matplotlib's colours.

Generated once with matplotlib 3.11.2 as `colormaps[name](range(256), bytes=True)[:, :3]`, so that no plotting
library is needed to serve. Where they come from:

* viridis, plasma, inferno, magma: Nathaniel J. Smith, Stefan van der Walt and Eric Firing, 2015, CC0
  (https://bids.github.io/colormap/). Perceptually uniform.
* cividis: Nunez, Anderton and Renslow, 2018 (https://doi.org/10.1371/journal.pone.0199239). Looks alike to readers
  with and without colour blindness.
* turbo: Anton Mikhailov, Google, 2019, Apache-2.0.
* jet, hot, bone, gray: piecewise linear functions of old, as matplotlib computes them.
"""

from __future__ import annotations

import base64
from functools import cache

import numpy as np
from numpy.typing import NDArray

from model.errors import InputError

_BASE64 = {
    "viridis": (
        "RAFURAJVRANXRQVYRQZaRQhbRglcRgteRgxfRg5hRw9iRxFjRxJlRxRmRxVnRxZpRxhqSBlrSBpsSBxuSB1vSB5wSCBxSCFySCJzSCN0"
        "RyV1RyZ2Ryd3Ryh4Ryp5Ryt6Ryx7Ri18Ri98RjB9RjF+RTJ/RTR/RTWARTaBRDeBRDmCQzqDQzuDQzyEQj2EQj6FQkCFQUGGQUKGQEOH"
        "QESHP0WHP0eIPkiIPkmJPUqJPUuJPUyJPE2KPE6KO1CKO1GKOlKLOlOLOVSLOVWLOFaLOFeMN1iMN1mMNlqMNluMNVyMNV2MNF6NNF+N"
        "M2CNM2GNMmKNMmONMWSNMWWNMWaNMGeNMGiNL2mNL2qNLmuOLmyOLm2OLW6OLW+OLHCOLHGOLHKOK3OOK3SOKnWOKnaOKneOKXiOKXmO"
        "KHqOKHqOKHuOJ3yOJ32OJ36OJn+OJoCOJoGOJYKOJYONJISNJIWNJIaNI4eNI4iNI4mNIomNIoqNIouNIYyNIY2MIY6MII+MIJCMIJGM"
        "H5KMH5OLH5SLH5WLH5aLHpeKHpiKHpmKHpmKHpqJHpuJHpyJHp2IHp6IHp+IHqCHH6GHH6KGH6OGIKSFIKWFIaaFIaeEIqeEI6iDI6mC"
        "JKqCJauBJqyBJ62AKK5/Ka9/KrB+K7F9LLF9LrJ8L7N7MLR6MrV6M7Z5Nbd4Nrh3OLl2Obl2O7p1Pbt0PrxzQL1yQr5xRL5wRb9vR8Bu"
        "ScFtS8JsTcJrT8NpUcRoU8VnVcZmV8ZlWcdkW8hiXslhYMlgYspfZMtdZ8xcacxba81Zbc5YcM5Wcs9VdNBUd9BSedFRfNJPftJOgdNM"
        "g9NLhtRJiNVHi9VGjdZEkNZDktdBldc/l9g+mtg8ndk6n9k4oto3pdo1p9szqtsyrdwwr9wust0std0rt90put4nvd4mv98kwt8ixd8h"
        "x+AfyuAezeAdz+Ec0uEb1OEa1+IZ2uIY3OIY3+MY4eMY5OMY5+QZ6eQZ7OQa7uUb8eUc8+Ue9uYf+OYh+uYi/eck"
    ),
    "plasma": (
        "DAeGEAeHEwaJFQaKGAaLGwaMHQaNHwWOIQWPIwWQJQWRJwWSKQWTKwWULQSULwSVMQSWMwSXNASYNgSYOASZOgSaOwOaPQObPwOcQAOc"
        "QgOdRAOeRQOeRwKfSQKfSgKgTAKhTgKhTwKiUQGiUgGjVAGjVgGjVwGkWQGkWgClXAClXgClXwCmYQCmYgCmZACnZQCnZwCnaACnagCn"
        "bACobQCobwCocACocgCocwCodQCodgGoeAGoeQGoewKofAKnfgOnfwOngQSnggSnhAWmhQamhgemiAeliQiliwmkjAqkjgykjw2jkA6j"
        "kg+ikxChlRGhlhKglxOgmRSfmhWemxeenRidnhmcnxqboBubohyaox2ZpB6YpR+XpyGXqCKWqSOVqiSUrCWTrSaSrieRryiQsCqPsSuP"
        "siyOtC2NtS6Mti+LtzCKuDKJuTOIujSHuzWGvDaFvTeEvjiDvzmCwDuBwTyAwj2Awz5/xD9+xUB9xkF8x0J7yER6yUV5ykZ4y0d3zEh2"
        "zUl1zkp1z0t00E1z0U5y0U9x0lBw01Fv1FJu1VNt1lVt11Zs11dr2Fhq2Vlp2lpo21tn3F1m3F5m3V9l3mBk32Fj32Ji4GRh4WVg4mZg"
        "42df42he5Gpd5Wtc5Wxb5m1a525a6HBZ6HFY6XJX6nNW6nRV63ZU7HdU7HhT7XlS7XtR7nxQ731P735O8IBN8IFN8YJM8oRL8oVK84ZJ"
        "84dI9IlH9IpH9YtG9Y1F9o5E9o9D9pFC95JB95NB+JVA+JY/+Jg++Zk9+Zo8+pw7+p06+p86+qA5+6I4+6M3+6Q2/KY1/Kc1/Kk0/Koz"
        "/Kwy/K0x/a8x/bAw/bIv/bMu/bUt/bYt/bgs/bkr/bsr/bwq/b4p/cAp/cEo/cMo/cQn/cYm/Mcm/Mkm/Msl/Mwl/M4l+9Ak+9Ek+9Mk"
        "+tUk+tYk+tgk+dkk+dsk+N0k+N8k9+Ak9+Il9uQl9uUl9ecm9ekm9Oom8+wm8+4m8vAm8vEm8fMm8PUl8PYj7/gh"
    ),
    "inferno": (
        "AAADAAAEAAAGAQAHAQEJAQELAgEOAgIQAwISBAMUBAMWBQQYBgQbBwUdCAYfCQYhCgcjCwcmDQgoDggqDwktEAkvEgoyEwo0FAs2Fgs5"
        "Fws7GQs+GgtAHAxDHQxFHwxHIAxKIgtMJAtOJgtQJwtSKQtUKwpWLQpYLgpaMApcMgldNAlfNQlgNwlhOQliOwlkPAllPglmQAlmQQln"
        "QwpoRQppRgppSAtqSgtqSwxrTQxrTw1sUA1sUg5sUw5tVQ9tVw9tWBBtWhFtWxFuXRJuXxJuYBNuYhRuYxRuZRVuZhVuaBZuahduaxdu"
        "bRhubhhucBluchltcxptdRttdhtteBxtehxtex1sfR1sfh5sgB9rgR9rgyBrhSBqhiFqiCFqiSJpiyJpjSNpjiRokCRokSVnkyVnlSZm"
        "liZmmCdlmShkmyhknCljniljoCpioSthoythpCxgpixfpy1fqS5eqy5drC9crjBbrzFbsTFasjJZtDNYtTNXtzRWuDVWujZVuzdUvTdT"
        "vjhSvzlRwTpQwjtPxDxOxT1Nxz5MyD5LyT9Ky0BJzEFIzUJHz0RG0EVE0UZD0kdC1EhB1UlA1ko/10s+2U092k4720863FA53VI43lM3"
        "31Q24FY04lcz41gy5Fox5Vsw5lwu5l4t518s6GEr6WIq6mQo62Un7Gcm7Wgl7Woj7mwi720h8G8f8HAe8XId8nQc8nUa83cZ83kY9HoW"
        "9XwV9X4U9oAS9oER94MQ94UO+IcN+IgM+IoL+YwJ+Y4I+ZAI+pEH+pMG+pUG+pcG+5kG+5sG+50G+54H+6AH+6II+6QK+6YL+6gN+6oO"
        "+6wQ+64S+7AU+7EW+7MY+7Ua+7cc+7ke+rsh+r0j+r8l+sEo+cMq+cUs+ccv+Mkx+Ms0+M03988699E89tM/9tVC9ddF9dlI9NtL9NxP"
        "895S8+BW8+JZ8uRd8uZg8ehk8elo8ets8e1w8e508fB58fJ98vOB8vSF8/aJ9PeN9fiR9vqV9/uZ+fyd+v2g/P6k"
    ),
    "magma": (
        "AAADAAAEAAAGAQAHAQEJAQELAgINAgIPAwMRBAMTBAQVBQQXBgUZBwUbCAYdCQcfCgciCwgkDAkmDQooDgoqDwssEAwvEQwxEg0zFA01"
        "FQ44Fg46Fw88GA8/GhBBGxBEHBBGHhBJHxFLIBFNIhFQIxFSJRFVJhFXKBFZKhFcKxFeLRBgLxBiMBBlMhBnNBBoNQ9qNw9sOQ9uOw9v"
        "PA9xPg9yQA9zQg90Qw91RQ92Rw93SBB4ShB5SxB5TRF6TxF7UBJ7UhJ8UxN8VRN9VxR9WBV+WhV+WxZ+XRd+Xhd/YBh/YRh/Yxl/ZRqA"
        "ZhqAaBuAaRyAaxyAbB2Abh6Bbx6BcR+Bcx+BdCCBdiGBdyGBeSKBeiKBfCOBfiSBfySBgSWBgiWBhCaBhSaBhyeBiSiBiiiBjCmAjSmA"
        "jyqAkSqAkiuAlCuAlSyAlyx/mS1/mi1/nC5/ni5+ny9+oS9+ozB+pDB9pjF9pzF9qTJ8qzN8rDN7rjR7sDR7sTV6szV6tTZ5tjZ5uDd4"
        "uTd4uzh3vTl3vjl2wDp1wjp1wzt0xTx0xjxzyD1yyj5yyz5xzT9wzkBw0EFv0UJu00Jt1ENt1kRs10Vr2UZq2kdp3Ehp3Ulo3kpn4Etm"
        "4Uxm4k1l5E5k5VBj5lFi51Ji6FRh6lVg61Zg7Fhf7Vlf7lte7l1d715d8GBd8WFc8mNc82Vc82db9Ghb9Wpb9Wxb9m5b9nBb93Fb93Nc"
        "+HVc+Hdc+Xlc+Xtd+X1d+n9e+oBe+oJf+4Rg+4Zg+4hh+4pi/Ixj/I5j/JBk/JJl/JNm/ZVn/Zdo/Zlp/Ztq/Z1r/Z9s/aFu/aJv/aRw"
        "/qZx/qhz/qp0/qx1/q52/q94/rF5/rN7/rV8/rd9/rl//ruA/ryC/r6D/sCF/sKG/sSI/saJ/seL/smN/suO/c2Q/c+S/dGT/dKV/dSX"
        "/daY/dia/dqc/dyd/d2f/d+h/eGj/OOl/OWm/Oao/Oiq/Oqs/Oyu/O6w/PCx/PGz/PO1/PW3+/e5+/m7+/q9+/y/"
    ),
    "cividis": (
        "ACJNACNPACNQACRSACVUACZVACZXACdZAChbAChcACleACpgACpiACtkACxmACxnAC1pAC5rAC9tAC9vADBwADBwADFwADFwBDJwCDNw"
        "CzNwDjRwETVvFDZvFjZvGDdvGjhvHDhuHTluHzpuITtuIjtuJDxuJT1tJz1tKD5tKj9tKz9tLEBtLkFsL0JsMEJsMUNsMkRsNERsNUVs"
        "NkZsN0ZsOEdsOUhsOkhrO0lrPUprPktrP0trQExrQU1rQk1rQ05rRE9rRU9rRlBrR1FrSFFrSVJrSlNrS1RsTFRsTVVsTlZsTlZsT1ds"
        "UFhsUVhsUllsU1psVFpsVVttVlxtV11tWF1tWV5tWV9tWl9tW2BuXGFuXWFuXmJuX2NuYGRuYWRvYWVvYmZvY2ZvZGdvZWhwZmlwZ2lw"
        "aGpwaGtxaWtxamxxa21xbG1ybW5ybm9ybnBzb3BzcHFzcXJzcnN0c3N0dHR1dHV1dXV1dnZ2d3d2eHh2eXh3eXl3enp3e3t3fHt4fXx4"
        "fn14f314gH54gX94goB4g4B4hIF4hYJ4hYN4hoN4h4R4iIV4iYZ4ioZ4i4d4jIh4jYl4jol4j4p3kIt3kYx3kox3k413lI53lY93lo93"
        "l5B2mJF2mZJ2mpN2m5N2nJR2nZV1npZ1n5Z1oJd1oZh0opl0o5p0pJp0pZtzppxzp51zqJ5zqZ5yqp9yq6ByrKFxraJxrqJxr6NwsKRw"
        "saVwsqZvs6ZvtKdvtahutqlut6ptuKttuattuqxsu61svK5rva9rvrBqv7BqwbFpwrJpw7NoxLRoxbVnxrVnx7ZmyLdlybhlyrlky7pk"
        "zLtjzbxizrxiz71h0L5g0r9g08Bf1MFe1cJe1sNd18Nc2MRb2cVa2sZa28dZ3MhY3slX38pW4MtV4cxU4sxT481S5M5R5c9Q5tBP6NFO"
        "6dJN6tNM69RL7NVK7dZI7tdH79hG8dlE8tpD89pC9NtA9dw/9t09+N47+d86+uA4++E2/eI0/eMz/eU0/eY2/ec3"
    ),
    "turbo": (
        "MBI7MRVCMhhKNBtRNR5YNiFfNyNlOCZsOSlyOix5Oy9/PDKFPDWLPTeRPjqWPz2cQEChQEOmQUWrQUiwQku1Q066Q1C+Q1PCRFbHRFjL"
        "RVvORV7SRWDWRWPZRmbdRmjgRmvjRm3mRnDoRnPrRnXtRnjwRnryRn30Rn/2RoL4RYT5RYf7RYn8RIz9Q479QpH+QZP+QJb+P5j+Ppv+"
        "PJ39O6D8OaL8OKX7Nqj5NKr4M6z2Ma/1L7HzLbTxK7bvKrntKLvrJr3pJcDmI8LkIcThIMbfHsncHcvaHM3XG8/UGtHSGdPPGNXMGNfK"
        "F9nHF9rEF9zCF96/GOC9GOG6GeO4GuS2G+W0HeexHuivIOmsIuupJOymJ+2jKe6gLO+dL/CaMvGXNfOUOPSRO/SNP/WKQvaHRveDSviA"
        "Tfl8Ufl5Vfp2WftyXftvYfxsZfxoaf1lbf1icf1fdP5ceP5ZfP5WgP5ThP5Qh/5Ni/5Ljv5Ikv5Glf5EmP5Cm/1Anv0+ofw9pPw7pvs6"
        "qfs5rPo3rvk3sfg2s/g1tvc1ufU0u/Q0vvM0wPIzw/Ezxe8zyO4zyu0zzes0z+o00eg01Oc11uU12OM12uI23eA239424dw349o35dg4"
        "59c46NU46tM57NE57c8578058Ms68sg688Y69MQ69sI698A5+L45+bw5+bo4+rc3+7U3+7M2/LA1/K40/asz/aky/aYx/aMw/qEv/p4u"
        "/pst/pgs/ZUr/ZIp/Y8o/Ywn/Ikm/IYk+4Mj+4Ai+n0g+nof+Xce+HQc93Eb924a9msY9WgX9GUW82MV8mAU8V0T71oR7lgQ7VUP7FIO"
        "6lAN6U0N6EsM5kkL5UYK40QK4kIJ4EAI3j4I3TwH2zoH2TgG1zYG1jQF1DIF0jAF0C8Ezi0EyysDySkDxygDxSYCwyQCwCMCviECux8B"
        "uR4BthwBtBsBsRkBrhgBrBYBqRUBphQBoxIBoBEBnRABmg4Blw0BlAwBkQsBjgoBiwkBhwgBhAcBgQYCfQUCegQC"
    ),
    "jet": (
        "AAB/AACEAACIAACNAACRAACWAACaAACfAACjAACoAACsAACxAAC2AAC6AAC/AADDAADIAADMAADRAADVAADaAADeAADjAADoAADsAADx"
        "AAD1AAD6AAD+AAD/AAD/AAD/AAD/AAT/AAj/AAz/ABD/ABT/ABj/ABz/ACD/ACT/ACj/ACz/ADD/ADT/ADj/ADz/AED/AET/AEj/AEz/"
        "AFD/AFT/AFj/AFz/AGD/AGT/AGj/AGz/AHD/AHT/AHj/AHz/AID/AIT/AIj/AIz/AJD/AJT/AJj/AJz/AKD/AKT/AKj/AKz/ALD/ALT/"
        "ALj/ALz/AMD/AMT/AMj/AMz/AND/ANT/ANj/ANz+AOD6AOT3Auj0BezxCPDtDPTqD/jnEvzkFf/hGP/dHP/aH//XIv/UJf/QKf/NLP/K"
        "L//HMv/DNv/AOf+9PP+6P/+3Qv+zRv+wSf+tTP+qT/+mU/+jVv+gWf+dXP+aX/+WY/+TZv+Qaf+NbP+JcP+Gc/+Ddv+Aef99fP95gP92"
        "g/9zhv9wif9sjf9pkP9mk/9jlv9fmv9cnf9ZoP9Wo/9Tpv9Pqv9Mrf9JsP9Gs/9Ct/8/uv88vf85wP82w/8yx/8vyv8szf8p0P8l1P8i"
        "1/8f2v8c3f8Y4P8V5P8S5/8P6v8M7f8I8fwF9PgC9/QA+vAA/u0A/+kA/+UA/+IA/94A/9oA/9cA/9MA/88A/8sA/8gA/8QA/8AA/70A"
        "/7kA/7UA/7EA/64A/6oA/6YA/6MA/58A/5sA/5gA/5QA/5AA/4wA/4kA/4UA/4EA/34A/3oA/3YA/3MA/28A/2sA/2cA/2QA/2AA/1wA"
        "/1kA/1UA/1EA/00A/0oA/0YA/0IA/z8A/zsA/zcA/zQA/zAA/ywA/ygA/yUA/yEA/x0A/xoA/xYA/hIA+g8A9QsA8QcA7AMA6AAA4wAA"
        "3gAA2gAA1QAA0QAAzAAAyAAAwwAAvwAAugAAtgAAsQAArAAAqAAAowAAnwAAmgAAlgAAkQAAjQAAiAAAhAAAfwAA"
    ),
    "hot": (
        "CgAADQAADwAAEgAAFQAAFwAAGgAAHAAAHwAAIgAAJAAAJwAAKgAALAAALwAAMQAANAAANwAAOQAAPAAAPwAAQQAARAAARgAASQAATAAA"
        "TgAAUQAAVAAAVgAAWQAAWwAAXgAAYQAAYwAAZgAAaQAAawAAbgAAcAAAcwAAdgAAeAAAewAAfgAAgAAAgwAAhQAAiAAAiwAAjQAAkAAA"
        "kwAAlQAAmAAAmgAAnQAAoAAAogAApQAAqAAAqgAArQAArwAAsgAAtQAAtwAAugAAvQAAvwAAwgAAxAAAxwAAygAAzAAAzwAA0gAA1AAA"
        "1wAA2QAA3AAA3wAA4QAA5AAA5wAA6QAA7AAA7gAA8QAA9AAA9gAA+QAA/AAA/gAA/wIA/wUA/wcA/woA/wwA/w8A/xIA/xQA/xcA/xoA"
        "/xwA/x8A/yEA/yQA/ycA/ykA/ywA/y8A/zEA/zQA/zYA/zkA/zwA/z4A/0EA/0QA/0YA/0kA/0sA/04A/1EA/1MA/1YA/1kA/1sA/14A"
        "/2AA/2MA/2YA/2gA/2sA/24A/3AA/3MA/3UA/3gA/3sA/30A/4AA/4MA/4UA/4gA/4oA/40A/5AA/5IA/5UA/5cA/5oA/50A/58A/6IA"
        "/6UA/6cA/6oA/6wA/68A/7IA/7QA/7cA/7oA/7wA/78A/8EA/8QA/8cA/8kA/8wA/88A/9EA/9QA/9YA/9kA/9wA/94A/+EA/+QA/+YA"
        "/+kA/+sA/+4A//EA//MA//YA//kA//sA//4A//8C//8G//8K//8O//8S//8W//8a//8e//8i//8m//8q//8u//8y//82//86//8+//9B"
        "//9F//9J//9N//9R//9V//9Z//9d//9h//9l//9p//9t//9x//91//95//99//+A//+E//+I//+M//+Q//+U//+Y//+c//+g//+k//+o"
        "//+s//+w//+0//+4//+8//+////D///H///L///P///T///X///b///f///j///n///r///v///z///3///7////"
    ),
    "bone": (
        "AAAAAAABAQECAgIDAwMEBAQGBQUHBgYIBwYJBwcKCAgMCQkNCgoOCwsPDAwRDQ0SDg0TDg4UDw8VEBAXEREYEhIZExMaFBQcFRQdFRUe"
        "FhYfFxcgGBgiGRkjGhokGxslHBsmHBwoHR0pHh4qHx8rICAtISEuIiIvIyIwIyMxJCQzJSU0JiY1Jyc2KCg4KSk5Kik6Kio7Kys8LCw+"
        "LS0/Li5ALy9BMDBCMTBEMTFFMjJGMzNHNDRJNTVKNjZLNzdMODdNODhPOTlQOjpROztSPDxUPT1VPj5WPz5XPz9YQEBaQUFbQkJcQ0Nd"
        "REReRUVgRkVhRkZiR0djSEhlSUlmSkpnS0toTExpTUxrTU1sTk5tT09uUFBwUVFxUlJyU1NyVFRzVFZ0VVd1Vlh2V1l3WFp4WVx5Wl15"
        "W156W197XGB8XWJ9XmN+X2R/YGWAYWaAYmiBYmmCY2qDZGuEZW2FZm6GZ2+HaHCHaXGIaXOJanSKa3WLbHaMbXeNbnmOb3qOcHuPcHyQ"
        "cX2Rcn+Sc4CTdIGUdYKVdoOVd4WWd4aXeIeYeYiZeomae4ubfIycfY2cfo6dfo+ef5GfgJKggZOhgpSig5WjhJejhZikhZmlhpqmh5un"
        "iJ2oiZ6pip+qi6CqjKGrjKOsjaStjqWuj6avkKewkamxkqqxk6uyk6yzlK20la+1lrC2l7G3mLK4mbO4mrW5mra6m7e7nLi8nbq9nru+"
        "n7y/oL2/ob7AocDBosHCo8LDpMPEpcTFpsbGp8fGqMfHqsjIq8nJrMrKrsvLr8zMsc3Nss7Ns87Otc/PttDQt9HRudLSutPTvNTUvdXU"
        "vtXVwNbWwdfXwtjYxNnZxdraxtvbyNzbydzcy93dzN7ezd/fz+Dg0OHh0eLi0+Pi1OPj1eTk1+Xl2Obm2ufn2+jo3Onp3urp3+rq4Ovr"
        "4uzs4+3t5e7u5u/v5/Dw6fHw6vHx6/Ly7fPz7vT07/X18fb28vf39Pj39fj49vn5+Pr6+fv7+vz8/P39/f7+////"
    ),
    "gray": (
        "AAAAAQEBAgICAwMDBAQEBQUFBgYGBwcHCAgICQkJCgoKCwsLDAwMDQ0NDg4ODw8PEBAQEREREhISExMTFBQUFRUVFhYWFxcXGBgYGRkZ"
        "GhoaGxsbHBwcHR0dHh4eHx8fICAgICAgIiIiIyMjJCQkJCQkJiYmJycnKCgoKCgoKioqKysrLCwsLCwsLi4uLy8vMDAwMDAwMjIyMzMz"
        "NDQ0NDQ0NjY2Nzc3ODg4ODg4Ojo6Ozs7PDw8PDw8Pj4+Pz8/QEBAQUFBQUFBQ0NDRERERUVFRkZGR0dHSEhISUlJSUlJS0tLTExMTU1N"
        "Tk5OT09PUFBQUVFRUVFRU1NTVFRUVVVVVlZWV1dXWFhYWVlZWVlZW1tbXFxcXV1dXl5eX19fYGBgYWFhYWFhY2NjZGRkZWVlZmZmZ2dn"
        "aGhoaWlpaWlpa2trbGxsbW1tbm5ub29vcHBwcXFxcXFxc3NzdHR0dXV1dnZ2d3d3eHh4eXl5eXl5e3t7fHx8fX19fn5+f39/gICAgYGB"
        "goKCg4ODg4ODhYWFhoaGh4eHiIiIiYmJioqKi4uLjIyMjY2Njo6Oj4+PkJCQkZGRkpKSk5OTk5OTlZWVlpaWl5eXmJiYmZmZmpqam5ub"
        "nJycnZ2dnp6en5+foKCgoaGhoqKio6Ojo6OjpaWlpqamp6enqKioqampqqqqq6urrKysra2trq6ur6+vsLCwsbGxsrKys7Ozs7OztbW1"
        "tra2t7e3uLi4ubm5urq6u7u7vLy8vb29vr6+v7+/wMDAwcHBwsLCw8PDw8PDxcXFxsbGx8fHyMjIycnJysrKy8vLzMzMzc3Nzs7Oz8/P"
        "0NDQ0dHR0tLS09PT09PT1dXV1tbW19fX2NjY2dnZ2tra29vb3Nzc3d3d3t7e39/f4ODg4eHh4uLi4+Pj4+Pj5eXl5ubm5+fn6Ojo6enp"
        "6urq6+vr7Ozs7e3t7u7u7+/v8PDw8fHx8vLy8/Pz8/Pz9fX19vb29/f3+Pj4+fn5+vr6+/v7/Pz8/f39/v7+////"
    ),
}
"""uint8 [256, 3] RGB of each table, row by row."""

COLORMAPS: tuple[str, ...] = tuple(_BASE64)
"""Names of the colormaps."""


@cache
def colour_table(name: str) -> NDArray[np.uint8]:
    """Return the colours of a map, lowest value first.

    Returns:
        uint8 [256, 3] RGB, read-only.

    Raises:
        InputError: `name` is not one of `COLORMAPS`.
    """
    if name not in _BASE64:
        raise InputError("colormap", f"colormap {name!r} is not offered; one of: {', '.join(COLORMAPS)}")
    return np.frombuffer(base64.b64decode(_BASE64[name]), dtype=np.uint8).reshape(256, 3)
