"""Chat templates that would never end, take all memory, or end the process."""

from __future__ import annotations

__all__ = ["CHAINS", "DEEP", "ENDLESS", "HUGE", "LONG"]

LOOP = "{% for i in range(100000) %}"
THREE = LOOP * 3 + "x" + "{% endfor %}" * 3


def loop(body: str, ns: str = "x=[]", n: int = 100_000) -> str:
    """Return a loop over what a namespace keeps."""
    return f"{{% set ns = namespace({ns}) %}}{{% for i in range({n}) %}}{body}{{% endfor %}}"


def doubled(use: str, start: str = "[1]", n: int = 60) -> str:
    """Return a list of two lists of two lists ..., and what is done with it."""
    make = "{% set ns.y = [ns.y, ns.y] %}{% set ns.x = [ns.x, ns.x] %}"
    return loop(make, f"x={start}, y={start}", n) + use


def nested(use: str, pair: str = "({},)", n: int = 3000) -> str:
    """Return a value in a value in a value ..., and what is done with it."""
    return loop("{% set ns.x = " + pair.format("ns.x") + " %}", "x=()", n) + use


# Work without an end, in little memory.
ENDLESS = [
    THREE,
    LOOP * 3 + "{% endfor %}" * 3,
    LOOP + "{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    LOOP + "{% set x = range(100000) | select('none') | list %}{% endfor %}",
    LOOP + "{% set x = range(100000) | map('abs') | list %}{% endfor %}",
    LOOP + "{% set x = range(100000) | map(attribute='real.real.real') | list %}{% endfor %}",
    LOOP + "{% set x = range(100000) | sum %}{% endfor %}",
    LOOP + "{% set x = range(100000) | max %}{% endfor %}",
    LOOP + "{% set x = range(100000) | unique | first %}{% endfor %}",
    LOOP + "{% set x = range(100000) | sort %}{% endfor %}",
    LOOP + "{% set x = range(100000) | groupby('real') %}{% endfor %}",
    LOOP + "{% set x = 'a' in range(100000) %}{% endfor %}",
    LOOP + "{% set x = range(100000).index(99999.0) %}{% endfor %}",
    LOOP + "{% set x = range(100000).count('a') %}{% endfor %}",
    LOOP + "{% set x = range(100000) | batch(3) | list %}{% endfor %}",
    LOOP + "{% set x = range(100000) | slice(3) | list %}{% endfor %}",
    LOOP + "{% set x = range(100000) | reverse | first %}{% endfor %}",
    LOOP + "{% for j in range(100000) %}{{ loop | list | first }}{% endfor %}{% endfor %}",
    LOOP + "{% for j in range(100000) %}{{ loop | reverse | first }}{% endfor %}{% endfor %}",
    "{% set x = 'a' * 1000000 %}" + LOOP + "{% set y = x.count('b') %}{% endfor %}",
    "{% set x = 'a' * 1000000 %}" + LOOP + "{% set y = 'b' in x %}{% endfor %}",
    "{% set x = 'a' * 1000000 %}" + LOOP + "{% set y = x.find('a' * 500 ~ 'b') %}{% endfor %}",
    "{% set x, y = 'a' * 1000000, 'a' * 1000000 %}" + LOOP + "{% set z = x == y %}{% endfor %}",
    "{% set x = [1] * 100000 %}{% set y = [1] * 100000 %}"
    + LOOP
    + "{% set z = x == y %}{% endfor %}",
    "{% set x = [1] * 100000 %}" + LOOP + "{% set z = 2 in x %}{% endfor %}",
    "{% set x = [1] * 100000 %}" + LOOP + "{% set z = x.count(2) %}{% endfor %}",
    "{% set x = ['a'] * 100000 %}" + LOOP + "{% set z = x | tojson %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "{% for x in [[[]]] recursive %}{{ loop([x, x]) }}{{ loop([x, x]) }}{% endfor %}",
    "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f() %}" * 40
    + "{% endcall %}" * 40,
    doubled("{{ ns.x == ns.y }}"),
    doubled("{{ ns.x < ns.y }}"),
    doubled("{{ ns.x in [ns.y] }}"),
    doubled("{{ [ns.x].index(ns.y) }}"),
    doubled("{{ ns.y in ([ns.x] | reverse) }}"),
    doubled("{{ ns.y in ([ns.x] | select) }}"),
    doubled("{{ ns.y in {'a': ns.x}.values() }}"),
    doubled("{{ [(1, ns.x)] | select | urlencode }}"),
    doubled("{{ {'a': ns.x} | urlencode }}"),
    doubled("{{ [ns.x] | sort }}"),
    doubled("{{ [ns.x, ns.y] | max }}"),
    doubled("{{ {(1, ns.x): 1} }}").replace("[ns.", "(ns.").replace("] %", ") %"),
    loop("{% set ns.x = (ns.x, ns.x) %}", "x=()", 60) + "{{ {ns.x: 1} }}",
    loop("{% set ns.x = (ns.x, ns.x) %}", "x=()", 60) + "{{ {}[ns.x] }}",
    loop("{% set ns.x = (ns.x, ns.x) %}", "x=()", 60) + "{{ {}.get(ns.x) }}",
    loop("{% set ns.x = (ns.x, ns.x) %}", "x=()", 60) + "{{ ns.x in {} }}",
    loop("{% set ns.x = (ns.x, ns.x) %}", "x=()", 60) + "{{ [ns.x] | unique | list }}",
    loop("{% set ns.x = (ns.x, ns.x) %}", "x=()", 60) + "{{ dict([(ns.x, 1)]) }}",
    doubled("{% for i in [1, 2] %}{{ loop.changed(ns.x) }}{% endfor %}"),
    *(
        "{% set x = 'a' * 1000 * 300 %}{% for i in range(500) %}{% set y = x "
        + use
        + " %}{% endfor %}"
        for use in ("| float", "is lower", "is upper")
    ),
    # What fails in a list that nobody reads goes on, and its error repeats the name.
    *(
        "{% set x = 'a' * 1000 * 300 %}{% for i in range(60) %}{% set y = "
        + use
        + " %}{% endfor %}"
        for use in ("[1] | map(x)", "[1] | select(x)", "[[1]] | selectattr('a', x)", "x.islower()")
    ),
    "{% set x = 'a' * 30000 %}{% set y = x.strip('b' * 30000 ~ 'a') %}",
    "{% set x = 'a' * 30000 %}{% set y = x.rstrip('b' * 30000 ~ 'a') %}",
    "{% set x = 'a' * 30000 %}{% set y = x | trim('b' * 30000 ~ 'a') %}",
    *(
        "{% set x = 7 ** 4000 %}{% for i in range(200) %}{% set y = x " + use + " %}{% endfor %}"
        for use in ("| center(9)", "| trim", "| replace('a', 'b')", "| string", "~ 1", "| tojson")
    ),
]

# One operation whose result has no end.
HUGE = [
    "{{ 'x' * 10**9 }}",
    "{{ [1] * 10**9 }}",
    "{{ 10**9 * (1, 2) }}",
    "{{ 10 ** (10 ** 9) }}",
    "{{ (10 ** 1000) ** 1000 }}",
    "{{ 2 ** (2 ** 64) }}",
    "{{ (-3) ** (10 ** 9) }}",
    "{% set ns = namespace(x=3) %}" + LOOP + "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ lipsum(n=10**7) }}",
    "{% for j in [1] %}{{ 2 in loop }}{% endfor %}",
    "{{ 'x' | center(10**9) }}",
    "{{ 'x'.center(10**9) }}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ 'x'.rjust(10**9, 'é') }}",
    "{{ '1'.zfill(10**9) }}",
    "{{ 'a\tb'.expandtabs(10**9) }}",
    "{{ ('x' * 1000).replace('', 'y' * 1000000) }}",
    "{{ ('x' * 1000000) | replace('x', 'y' * 1000) }}",
    "{{ ('\n' * 100000) | indent(100000) }}",
    "{{ 'x' | indent('y' * 100000000 * 5) }}",
    "{{ ('a' * 1000000).join(range(1000)) }}",
    "{{ ('a' * 1000000).join(['b'] * 1000) }}",
    "{{ (['b'] * 1000) | join('a' * 1000000) }}",
    "{{ range(1000) | join('a' * 1000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%(a)1000000000d' % {'a': 1} }}",
    "{{ '%((a))1000000000d' % {'(a)': 1} }}",
    "{{ '%.1000000000f' % 1.5 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000s' | format('x') }}",
    "{{ ('%(a)s' * 10000) % {'a': 'x' * 100000} }}",
    "{{ '%1000000000d' is odd }}",
    "{{ '%1000000000d' is divisibleby 7 }}",
    "{{ '{:>1000000000}'.format('x') }}",
    "{{ '{0:{1}}'.format(1, 1000000000) }}",
    "{{ '{:.1000000000f}'.format(1.5) }}",
    "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "{{ ('{0}' * 10000).format('x' * 100000) }}",
    "{{ ('{0!r}' * 10000).format('x' * 100000) }}",
    "{{ '{:>1000000000}' | attr('format') }}{% set f = '{:>1000000000}'.format %}{{ f(1) }}",
    "{{ ['%1000000000d'] | map('format', 1) | list }}",
    "{{ 1.5 | round(10**9) }}",
    "{{ 15 | round(-(10**9)) }}",
    "{{ 1.5 | round(10**9, 'ceil') }}",
    "{{ 'x' | round(9, 'ceil') }}",
    "{{ [1] | batch(10**9, 1) | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ [1, [1]] | tojson(indent=10**9) }}",
    "{{ ([1] * 100000) | tojson(indent='x' * 100000) }}",
    "{{ ([1] * 10000) | tojson(separators=('x' * 1000000, 'y')) }}",
    "{{ [[1] * 100000] * 100000 }}",
    "{{ [[[1] * 1000] * 1000] * 1000 }}",
    "{{ [['x' * 1000] * 1000] * 1000 }}",
    "{{ ('<' * 100000000) | escape }}",
    "{{ ([['<' * 1000] * 1000] * 1000) | escape }}",
    "{{ ('x ' * 100000000) | title }}",
    "{{ strftime_now('%' ~ 'Y' * 100000000) }}",
    "{{ (5).to_bytes(10**9, 'big') }}",
    "{{ 'x'.encode('utf-8').ljust(10**9) }}",
    "{{ {}.fromkeys(range(100000), 1) }}{{ 'x'.translate({120: 'y' * 10**9}) }}",
    "{{ raise_exception('x' * 10**9) }}",
    "{{ raise_exception([[['x'] * 1000] * 1000] * 1000) }}",
    "{{ 'a' ~ ('b' * 10**9) }}",
    "{% set x %}" + THREE + "{% endset %}",
    "{% filter upper %}" + THREE + "{% endfilter %}",
    LOOP * 2 + "y" * 10000 + "{% endfor %}" * 2,
    "{% macro f() %}" + "y" * 100000 + "{% endmacro %}" + LOOP + "{{ f() }}{% endfor %}",
    loop("{% set ns.x = ns.x ~ ns.x %}", "x='ab'"),
    loop("{% set ns.x = ns.x + ns.x %}", "x='ab'"),
    loop("{% set ns.x = ns.x + ns.x %}", "x=[1]"),
    loop("{% set ns.x = '%s%s' % (ns.x, ns.x) %}", "x='ab'"),
    loop("{% set ns.x = '{0}{0}'.format(ns.x) %}", "x='ab'"),
    loop("{% set ns.x = ns.x | escape | string %}", "x='<' "),
    loop("{% set ns.x = ns.x | tojson %}", "x='\"'"),
    loop("{% set ns.x = ns.x | urlencode %}", "x='%'"),
    loop("{% set ns.x = [ns.x | join(ns.x), 'ab'] %}", "x=['ab', 'ab']"),
    loop("{% set ns.x = ns.x | replace('a', ns.x) %}", "x='aa'"),
    loop("{% set ns.x = ns.x[:] + ns.x[:] %}", "x='ab'"),
    loop("{% set ns.x = [ns.x | list, ns.x | list] | sum(start=[]) %}", "x=[1]"),
    loop("{% set ns.x = ns.x + [range(100000) | list] %}"),
    loop("{% set ns.x = [ns.x, {'a': i, 'b': [i]}] %}", n=100_000) * 20,
    loop("{% set ns.x = (ns.x, 'abc'.strip, namespace(a=i)) %}", n=100_000) * 20,
    loop("{% set ns.x = '<' | safe + ns.x %}", "x='<'", n=100_000) * 5,
    doubled("{{ ns.x }}"),
    doubled("{{ ns.x | tojson }}"),
    doubled("{{ ns.x | string | length }}"),
    doubled("{{ ns.x ~ '' }}"),
    doubled("{{ '%s' % ns.x }}"),
    doubled("{{ '{}'.format(ns.x) }}"),
    doubled("{{ '{!r}'.format(ns.x) }}"),
    doubled("{{ ns.x | join }}"),
    doubled("{{ ns.x | upper }}"),
    doubled("{{ ns }}"),
    doubled("{{ ns.x.foo[ns.x] }}"),
    doubled("{{ raise_exception(ns.x) }}"),
    doubled("{{ {'a': ns.x}.items() }}"),
    doubled("{{ {'a': ns.x} | items | list }}"),
    doubled("{{ ns.x is upper }}"),
]

# Values and calls that are nested too deep for what recurses in C.
DEEP = [
    nested("{{ ns.x }}"),
    nested("{{ {ns.x: 1} }}"),
    nested("{{ ns.x in {} }}"),
    nested("{{ [ns.x] | unique | list }}"),
    nested("{{ {}[ns.x] }}"),
    nested("{{ ns.x == (1,) }}{{ ns.x == ns.x[0] }}"),
    nested("{{ ns.x | tojson }}", "[{}]"),
    nested("{{ ns.x | tojson }}", "{{'a': {}}}"),
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% for x in [1] recursive %}{{ loop([x]) }}{% endfor %}",
    "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}",
    "{% set ns = namespace() %}{% set ns.me = [ns] %}{{ ns }}",
]

# Chains that would be freed recursively; each of these ends well.
CHAINS = [
    nested("end", "{} | map('string')"),
    nested("end", "{} | select | batch(2)"),
    nested("end", "{} | reverse"),
    nested("end", "namespace(x={})"),
    nested("end", "cycler({})"),
    nested("end", "[{}].foo"),
    nested("end", "{{'a': {}}}.items()"),
    nested("end", "[{}].index"),
]

# Texts that a parser or a compiler would recurse over, or take very long for.
LONG = [
    "{{ " + "(" * 2_000 + "1" + ")" * 2_000 + " }}",
    "{{ " + "[" * 2_000 + "]" * 2_000 + " }}",
    "{{ " + "not " * 2_000 + "1 }}",
    "{{ " + "-" * 2_000 + "1 }}",
    "{{ 1" + " if 1 else 1" * 2_000 + " }}",
    "{{ 1" + " + 1" * 2_000 + " }}",
    "{{ 1" + " ** 1" * 2_000 + " }}",
    "{{ 1" + " ~ 1" * 2_000 + " }}",
    "{{ 1" + " and 1" * 2_000 + " }}",
    "{{ x" + ".a" * 2_000 + " }}",
    "{{ x" + "[0]" * 2_000 + " }}",
    "{{ x" + "|e" * 2_000 + " }}",
    "{{ x" + "()" * 2_000 + " }}",
    "{{ x" + "[1:]" * 2_000 + " }}",
    "{% if 1 %}" * 1000 + "{% endif %}" * 1000,
    "{% for i in x %}" * 1000 + "{% endfor %}" * 1000,
    "{% if 1 %}" + "{% elif 1 %}" * 2_000 + "{% endif %}",
    "{% set a %}" * 1000 + "{% endset %}" * 1000,
    "{% generation %}" * 1000 + "{% endgeneration %}" * 1000,
    "{% macro a() %}" * 1000 + "{% endmacro %}" * 1000,
    "{{ 1 " + "== 1 " * 2_000 + "}}",
    "{{ " + "9" * 200_000 + " }}",
    "{{ 0x" + "f" * 200_000 + " }}",
    "{{ 1 }}" * 300_000,
    "x" * 3_000_000,
    "{#" * 300_000,
    "{% raw %}" * 300_000,
]
