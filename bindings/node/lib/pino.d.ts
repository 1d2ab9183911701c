import { Writable } from 'node:stream';
import { ConnectOptions, PathOptions } from './index.js';

/**
 * A transport of pino, each line of which is a message: to a receiver that listens under `name`, for which it waits ten
 * seconds unless `timeout` says otherwise, or into the path channel of `directory`, which outlives the process. While
 * the lane is full, it waits, and pino buffers what it writes.
 *
 * @example
 * const logger = pino(pino.transport({ target: 'pelton/pino', options: { name: 'logs' } }));
 */
declare function transport(
  options: ({ name: string } & ConnectOptions) | ({ directory: string } & PathOptions)): Promise<Writable>;
export = transport;
