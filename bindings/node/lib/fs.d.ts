/// <reference types="node" />
/**
 * Files by the signatures of `node:fs/promises`, on pelton's engine. What the page cache has is read and written within
 * the call; the rest goes to io_uring, or, where the system lacks that, to threads of the engine. None of it uses the
 * pool of libuv, so neither slow disks nor `dns.lookup` delay each other.
 *
 * An error is a `PeltonError` with `code`, `errno`, `syscall`, `path` and `dest` as Node's own errors have them: `code`
 * is `ENOENT`, for instance. Beyond Node: a read fills its buffer unless the file ends, and a write writes all.
 *
 * @packageDocumentation
 */
import { Mode, OpenMode, PathLike } from 'node:fs';
export { constants } from 'node:fs';

/** An encoding, or none for a Buffer; `signal` ends it before its next read or write. */
export type ReadOptions = BufferEncoding | 'buffer' | null | {
  encoding?: BufferEncoding | 'buffer' | null | undefined;
  flag?: OpenMode | undefined;
  signal?: AbortSignal | undefined;
};
/** `flush` brings the file to the disk. */
export type WriteOptions = BufferEncoding | null | {
  encoding?: BufferEncoding | null | undefined;
  flag?: OpenMode | undefined;
  mode?: Mode | undefined;
  flush?: boolean | undefined;
  signal?: AbortSignal | undefined;
};
/** What can be written: text, bytes, or a sequence of them. */
export type Data = string | NodeJS.ArrayBufferView | Iterable<string | NodeJS.ArrayBufferView>
  | AsyncIterable<string | NodeJS.ArrayBufferView>;

/** The kind of a file. */
export interface Kinded {
  isFile(): boolean;
  isDirectory(): boolean;
  isSymbolicLink(): boolean;
  isFIFO(): boolean;
  isSocket(): boolean;
  isCharacterDevice(): boolean;
  isBlockDevice(): boolean;
}

/** The properties of a file: those of Node's, as numbers. */
export interface Stats extends Kinded {
  dev: number;
  ino: number;
  mode: number;
  nlink: number;
  uid: number;
  gid: number;
  rdev: number;
  size: number;
  blksize: number;
  blocks: number;
  atimeMs: number;
  mtimeMs: number;
  ctimeMs: number;
  birthtimeMs: number;
  atime: Date;
  mtime: Date;
  ctime: Date;
  birthtime: Date;
}

/** An entry of a directory. */
export interface Dirent<Name = string> extends Kinded {
  name: Name;
  parentPath: string;
}

/**
 * An open file. Its operations may overlap; those at the file's own position are made one after another.
 *
 * @example
 * const file = await open('notes', 'w+');
 * await file.write('hello');
 * console.log(await file.read(Buffer.alloc(5), 0, 5, 0));
 * await file.close();
 */
export class FileHandle {
  private constructor();
  /** Its descriptor; -1 once it is closed. */
  readonly fd: number;
  /** Reads into a part of `buffer`, at `position` or at the file's own. */
  read<Target extends NodeJS.ArrayBufferView>(
    buffer: Target, offset?: number | null, length?: number | null, position?: number | bigint | null,
  ): Promise<{ bytesRead: number; buffer: Target }>;
  read<Target extends NodeJS.ArrayBufferView = Buffer>(options?: {
    buffer?: Target | undefined;
    offset?: number | null | undefined;
    length?: number | null | undefined;
    position?: number | bigint | null | undefined;
  }): Promise<{ bytesRead: number; buffer: Target }>;
  /** Writes all of a part of `data`, at `position` or at the file's own. */
  write<Source extends NodeJS.ArrayBufferView>(
    data: Source, offset?: number | null, length?: number | null, position?: number | null,
  ): Promise<{ bytesWritten: number; buffer: Source }>;
  write(data: string, position?: number | null, encoding?: BufferEncoding | null):
    Promise<{ bytesWritten: number; buffer: string }>;
  /** Reads from the file's own position to its end. */
  readFile(options?: null | 'buffer' | { encoding?: 'buffer' | null; signal?: AbortSignal }): Promise<Buffer>;
  readFile(options: BufferEncoding | { encoding: BufferEncoding; signal?: AbortSignal }): Promise<string>;
  /** Writes all at the file's own position. */
  writeFile(data: Data, options?: WriteOptions): Promise<void>;
  appendFile(data: Data, options?: WriteOptions): Promise<void>;
  stat(): Promise<Stats>;
  /** Cuts the file, or appends zeros. */
  truncate(length?: number): Promise<void>;
  /** Brings the file to the disk, with all its properties. */
  sync(): Promise<void>;
  /** Brings the file to the disk, with those properties that reading it needs. */
  datasync(): Promise<void>;
  /** Closes it, once what was begun has ended. */
  close(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;
}

/** Opens a file: `r`, `r+`, `w`, `w+`, `a`, `a+`, with `x` to create a new one, `s` for O_SYNC; or open(2)'s flags. */
export function open(path: PathLike, flags?: OpenMode, mode?: Mode): Promise<FileHandle>;
/** The whole file. */
export function readFile(path: PathLike | FileHandle, options?: null | 'buffer'
  | { encoding?: 'buffer' | null; flag?: OpenMode; signal?: AbortSignal }): Promise<Buffer>;
export function readFile(path: PathLike | FileHandle, options: BufferEncoding
  | { encoding: BufferEncoding; flag?: OpenMode; signal?: AbortSignal }): Promise<string>;
/** Replaces the file's contents. Not at once: another reader may see a part of it. */
export function writeFile(path: PathLike | FileHandle, data: Data, options?: WriteOptions): Promise<void>;
export function appendFile(path: PathLike | FileHandle, data: Data, options?: WriteOptions): Promise<void>;
/** The properties of a file; of what a symbolic link leads to. */
export function stat(path: PathLike): Promise<Stats>;
/** The properties of a file, also of a symbolic link itself. */
export function lstat(path: PathLike): Promise<Stats>;
/** The names in a directory. */
export function readdir(path: PathLike, options?: null | BufferEncoding
  | { encoding?: BufferEncoding | null; withFileTypes?: false; recursive?: boolean }): Promise<string[]>;
export function readdir(path: PathLike, options: 'buffer' | { encoding: 'buffer'; withFileTypes?: false }):
  Promise<Buffer[]>;
export function readdir(path: PathLike, options: { withFileTypes: true; recursive?: boolean }): Promise<Dirent[]>;
/** Copies a file's contents in the kernel, and the permissions to a new one. `constants.COPYFILE_EXCL` as mode. */
export function copyFile(from: PathLike, to: PathLike, mode?: number): Promise<void>;
/** Removes a file, or with `recursive` a directory and all below it. */
export function rm(path: PathLike, options?: { recursive?: boolean; force?: boolean }): Promise<void>;
export function unlink(path: PathLike): Promise<void>;
export function rmdir(path: PathLike): Promise<void>;
/** Creates a directory; with `recursive` those above too, and returns the first one that it has created. */
export function mkdir(path: PathLike, options?: Mode | null | { recursive?: false; mode?: Mode }): Promise<undefined>;
export function mkdir(path: PathLike, options: { recursive: true; mode?: Mode }): Promise<string | undefined>;
/** Renames a file, and replaces one at `to`. */
export function rename(from: PathLike, to: PathLike): Promise<void>;
/** Creates a second name for a file. */
export function link(existing: PathLike, added: PathLike): Promise<void>;
/** Creates a symbolic link to `target` at `path`. */
export function symlink(target: PathLike, path: PathLike): Promise<void>;
export function readlink(path: PathLike, options?: BufferEncoding | { encoding?: BufferEncoding }): Promise<string>;
/** Cuts the file, or appends zeros. */
export function truncate(path: PathLike, length?: number): Promise<void>;
