'use strict';
// Each function of `pelton/fs` beside the one of `node:fs/promises`.
const assert = require('node:assert/strict');
const node = require('node:fs/promises');
const path = require('node:path');
const { setImmediate: turn } = require('node:timers/promises');
const { pathToFileURL } = require('node:url');
const test = require('node:test');
const { options, pelton, place, program } = require('./support.js');

const fs = require(`${process.env.PELTON_PACKAGE ?? '..'}/lib/fs.js`);
// More than the buffers and than one read of a file of unknown size.
const large = Buffer.alloc(1_000_003, 'abcdefg');

test('a_file_is_written_and_read_as_by_node', options, async () => {
  const at = place();
  for (const data of [Buffer.alloc(0), Buffer.from('text'), large]) {
    await fs.writeFile(at, data);
    assert.ok((await node.readFile(at)).equals(data));
    assert.ok((await fs.readFile(at)).equals(data));
  }
  await fs.writeFile(at, 'größe', { mode: 0o600 });
  await fs.appendFile(Buffer.from(at), [' ', Buffer.from('und')]);
  await fs.appendFile(pathToFileURL(at), ' mehr', 'latin1');
  assert.equal(await fs.readFile(at, 'utf8'), 'größe und mehr');
  assert.equal(await fs.readFile(at, { encoding: 'base64' }), await node.readFile(at, 'base64'));
  // A file whose length the system does not say.
  assert.match(await fs.readFile('/proc/self/status', 'utf8'), /^Name:/);
  await fs.truncate(at, 3);
  assert.equal((await node.stat(at)).size, 3);
  await assert.rejects(fs.readFile(at, { signal: AbortSignal.abort(new Error('enough')) }), /enough/);
});

test('a_handle_reads_and_writes_at_its_position_and_at_others', options, async () => {
  const at = place();
  const handle = await fs.open(at, 'w+', 0o640);
  assert.ok(handle.fd > 2);
  // Begun at once, at the file's own position: in order. The caller changes its memory meanwhile.
  const writes = await Promise.all(['a', 'b', 'c'].map((text, index) => {
    const data = Buffer.alloc(4, text);
    const writing = index === 0 ? handle.write(text.repeat(4)) : handle.write(data, { position: index === 1 ? -1 : null });
    data.fill('!');
    return writing;
  }));
  assert.deepEqual(writes.map((it) => it.bytesWritten), [4, 4, 4]);
  await handle.write(Buffer.from('xyz'), 1, 1, 0);
  await handle.write('Z', 11);
  const buffer = Buffer.alloc(8, '.');
  assert.deepEqual(await handle.read(buffer, 1, 6, 3), { bytesRead: 6, buffer });
  assert.equal(`${buffer}`, '.abbbbc.');
  assert.equal((await handle.read({ position: 0 })).bytesRead, 12);
  assert.equal((await handle.read(buffer)).bytesRead, 0);
  await handle.datasync();
  await handle.sync();
  assert.equal(await node.readFile(at, 'utf8'), 'yaaabbbbcccZ');
  const [ours, theirs] = [await handle.stat(), await node.stat(at)];
  for (const name of ['dev', 'ino', 'mode', 'nlink', 'uid', 'gid', 'size', 'blocks']) {
    assert.equal(ours[name], theirs[name], name);
  }
  assert.ok(Math.abs(ours.mtimeMs - theirs.mtimeMs) < 0.01);
  assert.equal(ours.mtime.getTime(), theirs.mtime.getTime());
  assert.ok(ours.isFile() && !ours.isDirectory());
  await Promise.all([handle.close(), handle.close()]);
  assert.equal(handle.fd, -1);
  await assert.rejects(handle.read(buffer), (error) => error.code === 'closed_handle');
  await assert.rejects(handle.read(buffer, 9), { code: 'ERR_OUT_OF_RANGE' });
});

test('directories_and_links_are_as_node_has_them', options, async () => {
  const root = place();
  assert.equal(await fs.mkdir(`${root}/a/b`, { recursive: true }), path.resolve(root));
  assert.equal(await fs.mkdir(`${root}/a/b`, { recursive: true }), undefined);
  await fs.mkdir(`${root}/c`, 0o700);
  await fs.writeFile(`${root}/a/file`, large);
  await fs.copyFile(`${root}/a/file`, `${root}/a/b/copy`);
  assert.ok((await node.readFile(`${root}/a/b/copy`)).equals(large));
  await fs.copyFile(`${root}/a/file`, `${root}/a/file`);
  assert.equal((await fs.stat(`${root}/a/file`)).size, large.length);
  await assert.rejects(fs.copyFile(`${root}/a/file`, `${root}/a/b/copy`, fs.constants.COPYFILE_EXCL),
    { code: 'EEXIST' });
  await fs.link(`${root}/a/file`, `${root}/second`);
  await fs.symlink('a/file', `${root}/link`);
  assert.equal(await fs.readlink(`${root}/link`), 'a/file');
  assert.ok((await fs.lstat(`${root}/link`)).isSymbolicLink());
  assert.equal((await fs.stat(`${root}/link`)).nlink, 2);
  await fs.rename(`${root}/second`, `${root}/c/renamed`);
  for (let i = 0; i < 1000; i += 1) await fs.writeFile(`${root}/c/${i}`, '');
  const sorted = (list) => [...list].sort();
  assert.deepEqual(sorted(await fs.readdir(`${root}/c`)), sorted(await node.readdir(`${root}/c`)));
  assert.deepEqual(sorted(await fs.readdir(root, { recursive: true })),
    sorted(await node.readdir(root, { recursive: true })));
  const kinds = (list) => sorted(list.map((it) => `${it.name} ${it.isDirectory()} ${it.isSymbolicLink()}`));
  assert.deepEqual(kinds(await fs.readdir(root, { withFileTypes: true })),
    kinds(await node.readdir(root, { withFileTypes: true })));
  await assert.rejects(fs.rmdir(root), { code: 'ENOTEMPTY' });
  await assert.rejects(fs.rm(root), { code: 'ERR_FS_EISDIR' });
  await fs.unlink(`${root}/link`);
  await fs.rm(root, { recursive: true });
  await fs.rm(root, { recursive: true, force: true });
  await assert.rejects(node.stat(root), { code: 'ENOENT' });
});

test('errors_are_as_node_has_them', options, async () => {
  const missing = `${place()}/none`;
  const same = async (name, ...given) => {
    const theirs = await node[name](...given).then(() => assert.fail(), (error) => error);
    const ours = await fs[name](...given).then(() => assert.fail(), (error) => error);
    assert.ok(ours instanceof pelton.PeltonError, `${ours}`);
    for (const field of ['code', 'errno', 'syscall', 'path', 'dest']) assert.equal(ours[field], theirs[field], name);
  };
  for (const name of ['open', 'readFile', 'stat', 'lstat', 'unlink', 'rmdir', 'mkdir', 'readlink']) {
    await same(name, missing);
  }
  await same('rename', missing, place());
  await same('open', '/', 'w');
  await assert.rejects(fs.open(7), { code: 'ERR_INVALID_ARG_TYPE' });
  await assert.rejects(fs.open('a\0b'), { code: 'ERR_OUT_OF_RANGE' });
  await assert.rejects(fs.open(missing, 'rx'), { code: 'ERR_OUT_OF_RANGE' });
});

test('many_operations_overlap_and_timers_have_their_turn', options, async () => {
  const at = place();
  await fs.writeFile(at, large);
  const handle = await fs.open(at);
  const found = await Promise.all(Array.from({ length: 3000 }, (_, i) => handle.read(Buffer.alloc(7), 0, 7, i * 7)));
  assert.ok(found.every(({ buffer }) => `${buffer}` === 'abcdefg'));
  let isOver = false;
  setTimeout(() => { isOver = true; }, 5);
  const buffer = Buffer.alloc(4096);
  // Each of these ends within its call.
  while (!isOver) await handle.read(buffer, 0, 4096, 0);
  await handle.close();
  await turn();
});

test('a_process_ends_with_its_files', options, async () => {
  const at = place();
  const file = JSON.stringify(`${path.dirname(require.resolve(process.env.PELTON_PACKAGE ?? '..'))}/fs.js`);
  const ends = program(`const fs = require(${file});
    const handle = await fs.open(argument, 'w');
    await Promise.all(Array.from({ length: 100 }, (_, i) => handle.write(Buffer.alloc(100_000), 0, 100_000, i * 1e5)));
    console.log((await handle.stat()).size);`, at);
  assert.equal(await ends.ended, 0);
  assert.equal(ends.output(), '10000000\n');
  const exits = program(`const fs = require(${file});
    const handle = await fs.open(argument, 'r+');
    for (let i = 0; i < 200; i += 1) void handle.read(Buffer.alloc(1e6)).then(() => { if (i === 2) process.exit(4); });`, at);
  assert.equal(await exits.ended, 4);
  // A worker that is terminated while it reads.
  const worker = program(`const { Worker } = require('node:worker_threads');
    const worker = new Worker(\`const fs = require(${file.replaceAll('"', "'")});
      const { parentPort, workerData } = require('node:worker_threads');
      for (let i = 0; i < 20; i += 1) void fs.readFile(workerData).then(() => parentPort.postMessage(1));\`,
    { eval: true, workerData: argument });
    await new Promise((resolve) => worker.once('message', resolve));
    await worker.terminate();
    console.log('ended');`, at);
  assert.equal(await worker.ended, 0);
  assert.equal(worker.output(), 'ended\n');
});
