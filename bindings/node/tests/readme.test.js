'use strict';
// The examples of README.md run: those of two processes beside each other.
const assert = require('node:assert/strict');
const fs = require('node:fs');
const path = require('node:path');
const test = require('node:test');
const { directory, options, start } = require('./support.js');

const text = fs.readFileSync(path.join(__dirname, '../README.md'), 'utf8');
const examples = [...text.matchAll(/^```js\n(.*?)^```/gms)].map((match) => match[1]);

test('the_examples_of_the_readme_run', options, async () => {
  assert.equal(examples.length, 12);
  const modules = path.join(directory, 'node_modules');
  fs.mkdirSync(modules);
  fs.symlinkSync(path.dirname(require.resolve(`${process.env.PELTON_PACKAGE ?? '..'}/package.json`)),
    path.join(modules, 'pelton'));
  // Names of their own, so that no other process has them.
  const run = (index) => {
    const file = path.join(directory, `example${index}.mjs`);
    fs.writeFileSync(file, examples[index].replace(/'(events|prices)'/, `'unix:${directory}/$1'`));
    return start(process.execPath, [file], { cwd: directory });
  };
  const [receiving, sending] = [run(0), run(1)];
  assert.equal(await sending.ended, 0);
  assert.equal(await receiving.ended, 0);
  assert.equal(receiving.output(), 'hello\na\nb\n');
  for (const [index, output] of [[2, 'a\nb\n'], [3, 'hello\n']]) {
    const example = run(index);
    assert.equal(await example.ended, 0);
    assert.equal(example.output(), output);
  }
  const [publishing, subscribing] = [run(4), run(5)];
  assert.equal(await publishing.ended, 0);
  assert.equal(await subscribing.ended, 0);
  assert.equal(subscribing.output(), '17, 0 missed\n');
  const durable = run(6);
  assert.equal(await durable.ended, 0);
  assert.equal(durable.output(), 'AAPL 17\n');
  const many = run(7);
  assert.equal(await many.ended, 0);
  assert.deepEqual(many.output().split('\n').sort(), ['', 'bids: 17', 'offers: 17']);
  const serving = run(8);
  const calling = run(9);
  assert.equal(await calling.ended, 0);
  assert.match(calling.output(), /^TEA\n\[[^\]]*\]\n1\n2\n$/);
  const files = run(10);
  assert.equal(await files.ended, 0);
  assert.equal(files.output(), 'file\nhello, file\n');
  const records = run(11);
  assert.equal(await records.ended, 0);
  assert.equal(records.output(), 'event 0\nevent 1\nevent 2\n');
  serving.kill('SIGTERM');
  assert.equal(await serving.ended, 0);
});
