'use strict';
const assert = require('node:assert/strict');
const fs = require('node:fs');
const test = require('node:test');
const { once } = require('node:events');
const { options, pelton, place, program, start, tool } = require('./support.js');

const { PeltonError, RecordFile, RecordReader } = pelton;
const coded = (code) => (error) => error instanceof PeltonError && error.code === code;

async function all(path) {
  const reader = await RecordReader.open(path);
  const messages = [];
  for await (const message of reader) messages.push(Buffer.from(message));
  reader.close();
  return messages;
}

test('appended_messages_are_read_in_order', options, async () => {
  const path = place();
  const file = await RecordFile.open(path, { flushBytes: 256 << 10, flushInterval: Infinity });
  const messages = Array.from({ length: 2000 }, (_, number) => Buffer.alloc((number * 37) % 3000, `${number} `));
  // Not awaited one by one: the buffer is full many times meanwhile, and the caller changes its memory.
  await Promise.all(messages.map((message) => {
    const changed = Buffer.from(message);
    const appended = file.append(changed);
    changed.fill(0);
    return appended;
  }));
  await file.flush();
  assert.deepEqual(await all(path), messages);
  const reader = await RecordReader.open(path);
  const together = await Promise.all(messages.map(() => reader.read()));
  assert.deepEqual(together, messages);
  assert.equal(await reader.read(), null);
  await file.append(Buffer.from('later'));
  await file.sync();
  assert.equal(`${await reader.read()}`, 'later');
  reader.close();
  await assert.rejects(reader.read(), coded('closed_handle'));
  const [last, closing] = [file.append(Buffer.from('last')), file.close()];
  await assert.rejects(file.append(Buffer.from('x')), coded('closed_handle'));
  await Promise.all([last, closing, file.close()]);
  assert.equal(`${(await all(path)).at(-1)}`, 'last');
});

test('record_files_say_what_is_wrong', options, async () => {
  const path = place();
  await assert.rejects(RecordReader.open(path), (error) => coded('system')(error) && error.cause.code === 'ENOENT');
  await assert.rejects(RecordFile.open(path, { flushInterval: -1 }), RangeError);
  await assert.rejects(RecordFile.open(path, { unknown: 1 }), RangeError);
  await assert.rejects(RecordFile.open(7), TypeError);
  fs.writeFileSync(path, 'no records, but long enough to have a header of them: '.repeat(9));
  await assert.rejects(RecordFile.open(path), coded('not_a_record_file'));
  await assert.rejects(RecordReader.open(path), coded('not_a_record_file'));
  const file = await RecordFile.open(place(), { flushBytes: 1 << 16 });
  await assert.rejects(file.append(Buffer.alloc(10 << 20)), coded('too_large'));
  await assert.rejects(file.append('text'), TypeError);
  await file.append(Buffer.from('after it'));
  await file.close();
});

test('damage_is_reported_and_reading_continues_behind_it', options, async () => {
  const path = place();
  const file = await RecordFile.open(path);
  for (const text of ['first', 'second', 'third']) {
    await file.append(Buffer.from(text));
    await file.flush();
  }
  await file.close();
  const bytes = fs.readFileSync(path);
  bytes[bytes.indexOf('second')] ^= 1;
  fs.writeFileSync(path, bytes);
  const reader = await RecordReader.open(path);
  assert.equal(`${await reader.read()}`, 'first');
  await assert.rejects(reader.read(), (error) => coded('damaged')(error) && error.nextOffset > error.offset);
  assert.equal(`${await reader.read()}`, 'third');
  reader.close();
});

test('rotation_continues_in_further_files', options, async () => {
  const path = place();
  const file = await RecordFile.open(path, { rotateBytes: 1 << 20, flushBytes: 1 << 16, syncBytes: 0 });
  for (let number = 0; number < 30; number += 1) await file.append(Buffer.alloc(60_000, number));
  await file.close();
  const found = [...await all(`${path}.000001`), ...await all(path)];
  assert.deepEqual(found, Array.from({ length: 30 }, (_, number) => Buffer.alloc(60_000, number)));
});

test('a_killed_writer_loses_nothing_that_was_flushed', options, async () => {
  const path = place();
  const text = `const file = await pelton.RecordFile.open(argument, { flushInterval: Infinity });
    for (let number = 0; number < 1000; number += 1) await file.append(Buffer.from(String(number)));
    await file.flush();
    await file.append(Buffer.from('in the buffer'));
    process.stdout.write('flushed');
    setInterval(() => {}, 1000);`;
  const writer = program(text, path);
  await once(writer.stdout, 'data');
  await assert.rejects(RecordFile.open(path), coded('role_taken'));
  writer.kill('SIGKILL');
  await writer.ended;
  const file = await RecordFile.open(path);
  await file.append(Buffer.from('successor'));
  await file.close();
  const found = (await all(path)).map(String);
  assert.deepEqual(found, [...Array.from({ length: 1000 }, (_, number) => `${number}`), 'successor']);
});

test('a_process_that_ends_without_close_writes_its_buffer', options, async () => {
  for (const [last, code] of [['', 0], ['process.exit(3);', 3], ['void file.flush(); process.exit(3);', 3],
    ['throw new Error("nobody catches it");', 1]]) {
    const path = place();
    const text = `const file = await pelton.RecordFile.open(argument, { flushInterval: Infinity });
      await file.append(Buffer.from('left'));
      await file.append(Buffer.alloc(100_000));
      ${last}`;
    assert.equal(await program(text, path).ended, code);
    assert.deepEqual(await all(path), [Buffer.from('left'), Buffer.alloc(100_000)], last);
  }
});

test('an_append_that_fails_unhandled_ends_the_process', options, async () => {
  const path = place();
  const text = `const file = await pelton.RecordFile.open(argument);
    process.on('unhandledRejection', (error) => { console.log(error.code); });
    void file.flush();
    void file.append(Buffer.alloc(8 << 20));
    await file.close();`;
  const child = program(text, path);
  assert.equal(await child.ended, 0);
  assert.equal(child.output().trim(), 'too_large');
});

test('the_tool_reads_record_files', { ...options, skip: !tool && 'PELTON_TOOL is not set' }, async () => {
  const path = place();
  const file = await RecordFile.open(path);
  await file.append(Buffer.from('from node'));
  await file.close();
  const cat = start(tool, ['cat', '--frame', 'lines', path]);
  assert.equal(await cat.ended, 0);
  assert.equal(cat.output(), 'from node\n');
});
