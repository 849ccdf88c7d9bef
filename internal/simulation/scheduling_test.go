package simulation

// The Go scheduler chooses among goroutines, cases of a select, timers of one instant and places in
// maps at random, and by the real time. For a simulation, the runtime is built with these changes,
// and each world runs in a separate process with one processor and without garbage collection. Each
// seed then has one history, regardless of other load on the machine. Goroutines that become ready
// still run in an order that the seed draws (randomizeScheduler).
var runtimeChanges = []deliberate{
	{"the random numbers of the process begin the same", "runtime/rand.go", "	globalRand.state.Init(*seed)\n", "	*seed = [32]byte{}\n	globalRand.state.Init(*seed)\n"},
	{"the seed draws the random numbers of a bubble", "runtime/rand.go", "func rand() uint64 {\n", `func rand() uint64 {
	if gp := getg().m.curg; gp == nil || gp.bubble != nil {
		simulated += 0xa0761d6478bd642f
		hi, lo := math.Mul64(simulated, simulated^0xe7037ed1a0b428db)
		return hi ^ lo
	}
`},
	{"the seed draws the cheap random numbers of a bubble", "runtime/rand.go", "func cheaprand() uint32 {\n", "func cheaprand() uint32 {\n	if gp := getg().m.curg; gp == nil || gp.bubble != nil {\n		return uint32(rand())\n	}\n"},
	{"a new thread draws nothing", "runtime/rand.go", "	mp.cheaprand = rand()\n", "	mp.cheaprand = 1\n"},
	{"the seed is set from outside", "runtime/rand.go", "var readRandomFailed bool\n", "var readRandomFailed bool\n\n//go:linkname simulated\nvar simulated uint64\n"},
	{"no monitor takes the processor from a goroutine after a real time", "runtime/proc.go", "	if haveSysmon {\n		systemstack", "	if false {\n		systemstack"},
	{"packages are initialized in no thread of their own", "runtime/proc.go", "to preserve the lock.\n	lockOSThread()\n\n", "to preserve the lock.\n\n"},
	{"nor is a thread given up after that", "runtime/proc.go", "	needUnlock = false\n	unlockOSThread()\n", "	needUnlock = false\n"},
	{"nor when it fails", "runtime/proc.go", "	needUnlock := true\n", "	needUnlock := false\n"},
	{"how often goroutines ran before does not matter", "runtime/proc.go", "if pp.schedtick%61 == 0 && !sched.runq.empty() {", "if simulated>>32%61 == 0 && !sched.runq.empty() {"},
	{"the order of goroutines is drawn", "runtime/proc.go", "const randomizeScheduler = raceenabled", "const randomizeScheduler = true"},
	{"a mutex does not measure how long it was waited for", "runtime/sema.go", "func internal_sync_nanotime() int64 {\n	return nanotime()", "func internal_sync_nanotime() int64 {\n	return 0"},
}

// environment is the environment of a process that runs one world.
var environment = []string{"GOMAXPROCS=1", "GOGC=off", "GOMEMLIMIT=4GiB", "GODEBUG=asyncpreemptoff=1,memprofilerate=0"}

// seedScheduler seeds the random numbers of the runtime. It does nothing in a program with the
// original runtime.
var seedScheduler = func(uint64) {}
