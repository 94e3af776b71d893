"""Shell text: what a script would start, followed without running it."""

import subprocess
import time

import pytest

from steelyard.spec import UserError
from steelyard.translate.shell import follow
from steelyard.translate.text import known, shown


def started(text, *arguments, **environment):
    """The last program, as bash would start it; unknown words as None."""
    return [known(word.pieces) for word in follow(text, "x.sh", arguments, environment).commands[-1].words]


SAME = {
    "default": 'a=${4:-8}; run $a ${a:-1} ${b-"x y"} "${c:=z}" $c',
    "arguments": 'run "$@" $# ${2} "${@:2}" ${*}',
    "arithmetic": "n=3; run $((n*2+1)) $((7/2)) $((-7/2)) $((2**10)) $(( n>2 ? 1 : 0 )) $[n+1] $((-7%3)) $((1<<4|1))",
    "continued": "run --a 1 \\\n  --b 2 \\\n  --c",
    "string of lines": "A=\" \\\n --x 1 \\\n --y 'q r' \\\n \"; run $A",
    "lists": 'a=(--x 1 "y z"); a+=(--w); run "${a[@]}" ${a[@]} ${#a[@]} ${a[0]} "${a[*]}"',
    "joined words": "x=ab; run pre${x}post 'a b'\"c d\"e\\ f ${x}${x} \"$x\"'$x'",
    "cut": "p=/a/b/c.tar.gz; run ${p##*/} ${p%.gz} ${p%%.*} ${p#*/} ${p/b/q} ${p//a/z} ${#p} ${p:1:3}",
    "case of letters": "x=abC; run ${x^^} ${x,,} ${x^}",
    "empty": 'e=; run "$e" $e "" x"$e"y',
    "if": 'x=3; if [ $x -gt 2 ] && [[ "$x" == 3 ]]; then y=a; else y=b; fi; run $y',
    "elif": "x=2; if [ $x -eq 1 ]; then y=1; elif (( x == 2 )); then y=2; else y=3; fi; run $y",
    "if of a word": "on=true; off=false; if $on; then y=1; fi; if $off; then y=2; fi; run $y",
    "and or": '[ -z "$nothing" ] && y=1; [ -n "$nothing" ] || z=2; run $y $z',
    "not": "if ! [ a = b ]; then y=1; fi; run $y",
    "test with and": "[ a = a -a -n b ] && y=1; run $y",
    "case": "case abc in x) y=1;; a*) y=2;; *) y=3;; esac; run $y",
    "for": 'for n in 1 2 3; do a="$a $n"; done; run $a',
    "counted": "for ((i=0; i<3; i++)); do a+=$i; done; run $a",
    "range": "run {1..4}",
    "while": 'while [ $# -gt 0 ]; do case $1 in --x) x=$2; shift 2;; *) shift;; esac; done; run "$x"',
    "options": 'set -- -t 4 -v -x5 rest; while getopts "t:vx:" o; do '
    "case $o in t) T=$OPTARG;; x) X=$OPTARG;; esac; done; run $T $X $OPTIND",
    "function": 'f() { local v=$1; y="$v-$2"; }; f a b; run $y',
    "eval": "c='run a \"b c\"'; eval $c",
    "bash -c": "export A='x y'; bash -c 'run $A \"$A\" z'",
    "subshell": "a=1; (a=2; true); run $a",
    "own variable": "A=0; A=1 true; run x$A",
    "echo": "x=$(echo a b); run $x",
    "expr": "x=`expr 3 + 4`; run $x",
    "indirect": "a=b; b=c; run ${!a}",
    "ansi": "run $'a\\tb'",
    "comment ends a command": "run a \\\n # no more\n b=1",
    "read as words": "x='a   b'; run $x \"$x\"",
    "set": "set -- p q; run $1 $2 $#",
    "export of a text": 'export "A=x y" B=2; run "$A" $B',
    "let": "let 'a=2+3'; run $a",
    "plus": "a=1; run ${a:+yes} ${b:+no} end",
}


@pytest.mark.parametrize("name", SAME)
def test_as_bash_does(name, tmp_path):
    """bash itself says what the program would be given."""
    script = SAME[name]
    arguments = ["one", "--x", "t w o"]
    run = f'run() {{ printf "%s\\0" "$@"; }}; export -f run; {script}'
    done = subprocess.run(["bash", "-c", run, "x.sh", *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    assert started(script, *arguments) == ["run", *done.stdout.split("\0")[:-1]]


def test_here_documents():
    text = 's=2\nf=./c.json\ncat <<EOT > $f\n{"a": $s, "b": "${s}x", "c": \\$s}\nEOT\n'
    text += "cat > raw <<'EOT'\n$s\nEOT\necho hi\n"
    files = follow(text, "x.sh").state.files
    assert shown(files["./c.json"].value) == '{"a": 2, "b": "2x", "c": $s}\n'
    assert shown(files["raw"].value) == "$s\n"


def test_what_only_a_run_would_tell():
    words = follow("a=$(hostname -i)\nrun --addr $a --n $((a+1)) $MISSING", "x.sh").commands[-1].words
    assert [known(w.pieces) for w in words] == ["run", "--addr", None, "--n", None, None]
    assert "hostname" in words[2].unknown.why and words[5].unknown.name == "MISSING"
    assert started("run $MISSING", MISSING="here") == ["run", "here"]


def test_a_test_that_cannot_be_decided():
    words = follow("x=1\nif [ -f a ]; then y=a; z=1; else y=b; z=1; fi\nrun $x $y $z", "x.sh").commands[-1].words
    assert [known(w.pieces) for w in words] == ["run", "1", None, "1"]
    assert [shown(v) for v in words[2].unknown.choices] == ["a", "b"]
    leaves = follow("if [ -f a ]; then exit 1; fi\ny=2\nrun $y", "x.sh").commands[-1].words
    assert known(leaves[1].pieces) == "2"


@pytest.mark.parametrize("added", ["A+=(--load x)", 'A="$A --load x"', 'A="$A \\\n --load x"'])
def test_only_what_a_branch_adds_is_undecided(added):
    first = "A=(--x 1)" if "(" in added else 'A="--x 1"'
    expanded = '"${A[@]}"' if "(" in added else "$A"
    later = added.replace("load", "save")
    text = f"{first}\nif [ -d a ]; then {added}; fi\nif [ -d b ]; then {later}; fi\nrun {expanded} end"
    words = follow(text, "x.sh").commands[-1].words
    assert [known(w.pieces) for w in words] == ["run", "--x", "1", None, None, "end"]
    assert [[shown(v).split() for v in w.unknown.choices] for w in words[3:5]] == [
        [["--load", "x"], []], [["--save", "x"], []]]  # fmt: skip
    inside = follow("N=run\nif [ -d a ]; then N=${N}_1; fi\nrun $N", "x.sh").commands[-1].words
    assert [shown(v) for v in inside[1].unknown.choices] == ["run_1", "run"]


def test_lines():
    words = follow('A="--x 1 \\\n   --y 2"\nrun --z 3 \\\n  $A', "x.sh").commands[-1].words
    assert [word.line for word in words] == [3, 3, 3, 1, 1, 2, 2]


HOSTILE = {
    "10 MB": "x" * 10_000_000,
    "many lines": "a=1\n" * 30_000,
    "recursion": "f() { f; f; }; f",
    "shells in shells": 'x=\'eval "$x"\'; eval "$x"',
    "endless loop": "while true; do x=1; done",
    "long loop": "for ((i=0; i<100000000; i++)); do x=$i; done",
    "huge range": "for i in {1..999999999}; do x=1; done",
    "growth": "a=x; for i in {1..60}; do a=$a$a; done",
    "list growth": "a=(1)\n" + "a+=(${a[@]} ${a[@]})\n" * 40,
    "nested parentheses": "(" * 60_000,
    "nested arithmetic": "x=" + "$((" * 20_000,
    "nested expansions": "x=" + "${a:-" * 5_000 + "}" * 5_000,
    "nested substitutions": "x=" + "$(" * 10_000 + ")" * 10_000,
    "nested tests": "if [ -f a ]; then " * 2_000 + "x=1; " + "fi; " * 2_000,
    "quotes": "'\"`" * 40_000,
    "power": "x=$((9**9**9**9))",
    "patterns": "x=" + "a" * 9_000 + "\ny=${x##" + "*a" * 30 + "b}",
    "binary": "\0\1\2\3" * 20_000,
    "undecided for ever": "f() { if [ -f x ]; then f; else f; fi; }; f",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_scripts_end_at_once(name):
    """Processor time, since other tests may run beside this one."""
    begun = time.process_time()
    try:
        follow(HOSTILE[name], "x.sh")
    except UserError as failure:
        assert failure.problems[0].code in ("F011", "F012") and "x.sh" in str(failure)
    assert time.process_time() - begun < 1


def test_nothing_is_run(tmp_path):
    mark = tmp_path / "mark"
    follow(f"x=$(touch {mark}); `touch {mark}`; touch {mark}; echo a > {mark}; eval 'touch {mark}'", "x.sh")
    assert not mark.exists()
