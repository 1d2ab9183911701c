// Compiled by `tsc --strict`, and not run: what users write, and what must be refused.
import fs, { FileHandle, open } from 'pelton/fs';
import pino from 'pelton/pino';
import pelton, {
  Client, Failed, PeltonError, Publisher, Receiver, RecordFile, RecordReader, Sender, Service, Subscriber, gather,
  listen, publish, threads,
} from 'pelton';

async function channels(): Promise<void> {
  const sender: Sender = await Sender.connect('a', { timeout: 1000, signal: AbortSignal.timeout(10) });
  await sender.send(new Uint8Array(3), { timeout: 1 });
  const count: number = await sender.sendMany([Buffer.from('a')]);
  const isSent: boolean = sender.trySend(Buffer.alloc(count));
  const receiver: Receiver = await listen('b').acceptReceiver();
  for await (const message of receiver) message.readUInt8(0);
  const messages: Buffer[] = await receiver.recvMany(isSent ? 10 : 20);
  const none: Buffer | null = receiver.tryRecv();
  const pair: { sender: Sender; receiver: Receiver } = threads({ capacity: 65_536, traced: true });
  const traceparent: string | null = pair.receiver.traceparent;
  await sender.send(messages[0] ?? Buffer.alloc(0), { timeout: 1, traceparent });
  Sender.attach(pair.sender.detach()).close();
  gather('c', { lanes: 2 }).close();
  void [messages, none, pelton.threads];
  // @ts-expect-error: text is not bytes.
  await sender.send('text');
  // @ts-expect-error: a sender's option.
  await Receiver.connect('a', { traced: true });
  // @ts-expect-error: a misspelt option.
  await receiver.recv({ timout: 1 });
  // @ts-expect-error: only listen, connect and so on make one.
  new Receiver();
}

async function broadcasts(): Promise<void> {
  const publisher: Publisher = publish('e', { history: 10, holdMax: 100, capacity: 65_536 });
  await publisher.waitSubscribers(1, { timeout: 1 });
  const isSent: boolean = publisher.trySend(new Uint8Array(1));
  const behind: number[] = publisher.subscribers().map((it) => it.behind + (it.holds ?? 0));
  const subscriber = await Subscriber.connect('e', { policy: 'gate', lagAfter: 10, slack: 4096, startFrom: 'oldest' });
  for await (const { data, number, missed } of subscriber) data.readUInt8(number + missed);
  void [isSent, behind, subscriber.missed, subscriber.tryRecv()?.data];
  // @ts-expect-error: no policy.
  await Subscriber.connect('e', { policy: 'fast' });
  // @ts-expect-error: a subscriber's option.
  publish('e', { policy: 'lag' });
}

async function calls(): Promise<void> {
  const service = Service.listen('d', { callBytesMax: 1 << 20 });
  const client = await Client.connect('d');
  await service.run(async (request) => {
    request.signal.throwIfAborted();
    await client.call(request.data, { traceparent: request.traceparent });
    if (request.data.length === 0) throw new Failed(1, 'empty');
    return request.data;
  }, { inFlightMax: 3 });
  await service.run(async function* parts(request) {
    yield request.data;
  });
  const reply: Buffer = await client.call(Buffer.from('x'), { idempotent: true });
  for await (const part of client.stream(reply)) part.toString();
  try {
    await client.notify(reply);
  } catch (error) {
    if (error instanceof PeltonError) void [error.code.length, error.unreleased, error.offset, error.nextOffset];
  }
  // @ts-expect-error: a number is no reply.
  await service.run(() => 7);
}

async function files(): Promise<void> {
  const handle: FileHandle = await open('a', 'w+', 0o600);
  const { bytesRead, buffer }: { bytesRead: number; buffer: Buffer } = await handle.read(Buffer.alloc(7), 0, 7, null);
  const { bytesWritten } = await handle.write('text', 3, 'utf8');
  const text: string = await fs.readFile(new URL('file:///a'), 'utf8');
  const bytes: Buffer = await fs.readFile(handle);
  await fs.writeFile('b', [text, bytes], { flag: 'wx', flush: true });
  const names: string[] = await fs.readdir('.', { recursive: true });
  for (const entry of await fs.readdir('.', { withFileTypes: true })) if (entry.isFile()) await fs.rm(entry.name);
  const first: string | undefined = await fs.mkdir('c', { recursive: true });
  void [bytesRead, buffer, bytesWritten, names, first, (await handle.stat()).size, pino({ name: 'logs' })];
  // @ts-expect-error: an encoding gives text.
  const none: Buffer = await fs.readFile('a', 'utf8');
  // @ts-expect-error: no options of a read.
  await fs.rm('a', { mode: 7 });
  void none;
}

async function records(): Promise<void> {
  const file: RecordFile = await RecordFile.open(new URL('file:///a'), { rotateBytes: 1 << 20, flushInterval: Infinity });
  await file.append(Buffer.from('x'));
  const cut: number = file.cutBytes;
  const reader = await RecordReader.open('a');
  const message: Buffer | null = await reader.read();
  for await (const one of reader) one.toString();
  // @ts-expect-error: no text.
  await file.append('x');
  void [cut, message];
}

void [broadcasts, channels, calls, files, records];
