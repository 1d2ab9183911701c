'use strict';
// What the tests share: names, processes that end with the test, and the package.

const { spawn } = require('node:child_process');
const fs = require('node:fs');
const os = require('node:os');
const path = require('node:path');
const { after } = require('node:test');

// run-tests installs the package, and says where.
const pelton = require(process.env.PELTON_PACKAGE ?? '..');
const tool = process.env.PELTON_TOOL;

const directory = fs.mkdtempSync(path.join(os.tmpdir(), 'node-'));
const children = new Set();
let count = 0;

after(() => {
  for (const child of children) child.kill('SIGKILL');
  fs.rmSync(directory, { recursive: true });
});

/** A new path below the test's directory. */
function place() {
  count += 1;
  return path.join(directory, `${count}`);
}

function name() {
  return `unix:${place()}`;
}

/** Starts a process; `output` is what it has written, `ended` its exit code or signal. */
function start(command, args, options = {}) {
  const child = spawn(command, args, { stdio: ['pipe', 'pipe', 'inherit'], ...options });
  children.add(child);
  const chunks = [];
  child.stdout.on('data', (chunk) => chunks.push(chunk));
  child.output = () => Buffer.concat(chunks).toString();
  child.ended = new Promise((resolve) => {
    child.on('close', (code, signal) => {
      children.delete(child);
      resolve(signal ?? code);
    });
  });
  return child;
}

/** Starts a program of Node that has `pelton` and `argument`; with flags of Node, or so many descriptors at most. */
function program(text, argument, { flags = [], descriptorsMax } = {}) {
  const head = `const pelton = require(${JSON.stringify(require.resolve(process.env.PELTON_PACKAGE ?? '..'))});
    const argument = ${JSON.stringify(argument)};`;
  const args = [...flags, '-e', `${head}\n(async () => { ${text} })();`];
  if (descriptorsMax === undefined) return start(process.execPath, args);
  return start('sh', ['-c', `ulimit -n ${descriptorsMax} && exec "$0" "$@"`, process.execPath, ...args]);
}

/** Of each test: nothing takes so long. Under a sanitizer all is slower. */
const options = { timeout: 1000 * Number(process.env.PELTON_TEST_SECONDS ?? 60) };

/** Every wait of a test has this limit, in milliseconds. */
const LIMIT = { timeout: 20_000 };

module.exports = { LIMIT, directory, name, options, pelton, place, program, start, tool };
