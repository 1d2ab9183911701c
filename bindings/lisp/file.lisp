;;;; Files: an engine carries out operations; each function waits for its own, and can be interrupted.

(in-package #:pelton)

(define-handle engine ()
  "Carries out operations on files: OPEN-ENGINE. One thread at a time uses it; open one for each.")

(define-handle file ()
  "An open file: OPEN-FILE. Any thread may use it at any time, each with its own engine, but none while another closes
it.")

(define-figures engine)

(defun open-engine (&key threads-max in-flight-max root)
  "Opens an ENGINE, which uses io_uring, or, for what that does not do, up to :THREADS-MAX threads, 8. :ROOT is a
directory that no path leads out of. Waits only to open the root. Signals OPTION-ERROR, SYSTEM-ERROR.

    (pelton:with-engine (engine :root \"/srv/notes\")
      (pelton:write-file-octets engine \"today\" octets :sync t))"
  (with-path (root root)
    (check (with-options (options engine-options threads-max in-flight-max root)
             (opening (out %make-engine) (%engine-open options out))))))

(defmacro with-engine ((engine &rest options) &body body)
  "Runs BODY with the engine that OPEN-ENGINE returns, and closes it however BODY is left."
  `(with-handle (,engine (open-engine ,@options)) ,@body))

;;; ---- One operation
;;;
;;; It is submitted, and its completion is waited for, because a wait in the library could not be interrupted. An
;;; interrupt that unwinds, and a timeout, cancel it, and wait until the kernel has released its memory: so that can be
;;; a Lisp vector, pinned meanwhile.

(defconstant +token+ 1 "The token of the one operation in flight.")

(defun failed (errno what name)
  (make-condition 'system-error :code +system+ :errno errno
                                :detail (format nil "~a~@[ ~a~]: ~a" what name (sb-int:strerror errno))))

(defun cancel-operation (engine completion)
  "Cancels the operation in flight, and drops its result. Without interrupts, and however long that takes: until it has
ended, its memory can be written."
  (declare (type word engine) (type system-area-pointer completion))
  (with-words (taken 1)
    (%engine-cancel engine +token+)
    ;; The kernel may have no memory to cancel it now: then its memory and its token stay in use.
    (loop for code = (%engine-completions engine +forever+ completion 1 taken)
          while (or (eql code +again+) (eql code +system+))
          do (poll-milliseconds -1 1))
    (unless (zerop (file-completion.file completion))
      (%close (file-completion.file completion)))))

(defun call-with-operation (engine operation timeout what name finish)
  "Carries out the C operation at OPERATION. Returns the value of FINISH, called with the SAP of the completion, without
interrupts."
  (declare (type engine engine) (type system-area-pointer operation) (type function finish) (dynamic-extent finish))
  (let ((address (handle-address engine)) (in-flight nil) (value nil) (ended nil))
    (with-structure (completion file-completion)
      (with-words (taken 1)
        (setf (operation.token operation) +token+)
        (flet ((submit ()
                 (without-interrupts
                   (let ((result (result (%engine-submit address operation 1 taken))))
                     ;; Also if it cannot be started yet.
                     (setf in-flight (eql (sap-ref-64 taken 0) 1))
                     result)))
               (complete (deadline)
                 (without-interrupts
                   (let ((result (result (%engine-completions address deadline completion 1 taken))))
                     (when (eql result +ok+)
                       (setf in-flight nil
                             value (let ((errno (file-completion.error completion)))
                                     (if (zerop errno) (funcall finish completion) (failed errno what name)))))
                     result)))
               (ready (deadline)
                 (wait-until-ready (engine address nil deadline) attempt)))
          (without-interrupts
            (unwind-protect
                 (with-pinned-objects (engine)
                   (with-local-interrupts
                     (let ((submitted (submit)))
                       (unless in-flight (check submitted)))
                     (persisting ()
                       (wait-for timeout #'complete #'ready)))
                   (setf ended t))
              (when in-flight (cancel-operation address completion))
              ;; It was opened, and an interrupt keeps it from the caller.
              (when (and (not ended) (typep value 'handle)) (close-quietly value))))
          (check value))))))

(defmacro operating ((engine kind &key file timeout name) (&rest fields) (completion &body body))
  "Carries out the operation of KIND, +FILE-SYNC+ and so on, on FILE, whose fields are FIELDS, a list of (FIELD VALUE).
Returns the value of BODY, with COMPLETION bound to the SAP of the completion, without interrupts. NAME is for
messages."
  (let ((operation (gensym "OPERATION")) (on (gensym "FILE")))
    `(let ((,on ,file))
       (with-pinned-objects (,on)
         (with-structure (,operation operation)
           (setf (operation.kind ,operation) ,kind
                 ,@(when file `((operation.file ,operation) (handle-address ,on)))
                 ,@(loop for (field value) in fields
                         append `((,(name "operation.~a" field) ,operation) ,value)))
           (call-with-operation ,engine ,operation ,timeout (operation-name ,kind) ,name
                                (lambda (,completion) (declare (ignorable ,completion)) ,@body)))))))

(defun operation-name (kind)
  "As \"sync data\", for messages."
  (let ((constant (first (find-if (lambda (constant)
                                    (and (eql (second constant) kind) (search "FILE-" (symbol-name (first constant)))))
                                  *constants*))))
    (substitute #\Space #\- (subseq (string-downcase constant) (length "file-")))))

;;; ---- Operations

(defun offset-value (offset)
  (etypecase offset
    (null +current+)
    ((eql :end) +at-end+)
    ((unsigned-byte 62) offset)))

(defun open-file (engine path &key (direction :input) create exclusive truncate directory (mode #o666) timeout)
  "Opens a FILE. :DIRECTION is :INPUT, :OUTPUT or :IO. :CREATE T creates it if there is none, with the permissions :MODE
less the umask; :EXCLUSIVE T only then. :TRUNCATE T empties it. :DIRECTORY T is for LIST-DIRECTORY. This and every
operation waits up to TIMEOUT seconds, and an interrupt can unwind from it; then it may be carried out, or not. Signals
SYSTEM-ERROR, with SYSTEM-ERROR-ERRNO; TIMED-OUT with the restart WAIT-LONGER."
  (check-library)
  (with-path (name path)
    (operating (engine +file-open+ :timeout timeout :name path)
        ((path name)
         ;; As <fcntl.h> has them on Linux.
         (open-flags (logior (ecase direction (:input 0) (:output 1) (:io 2))
                             (if create #o100 0) (if exclusive #o300 0) (if truncate #o1000 0)
                             (if directory #o200000 0)))
         (mode mode))
        (completion (adopt (%make-file :address (file-completion.file completion)))))))

(defmacro with-file ((file engine path &rest options) &body body)
  "Runs BODY with the file that OPEN-FILE returns, and closes it however BODY is left."
  `(with-handle (,file (open-file ,engine ,path ,@options)) ,@body))

(defun transfer (engine kind file octets start end offset timeout)
  (declare (type engine engine) (type file file))
  (with-octets-at (sap size) (octets start end)
    ;; struct iovec: an address and a size.
    (with-words (memory 2)
      (setf (sap-ref-sap memory 0) sap
            (sap-ref-64 memory 8) size)
      (operating (engine kind :file file :timeout timeout)
          ((memory (sap-int memory)) (memory-count 1) (offset (offset-value offset)))
          (completion (file-completion.count completion))))))

(defun read-file (engine file octets &key (start 0) end offset timeout)
  "Reads from FILE at OFFSET, NIL for the file's own position, which moves, into OCTETS from START to END. Returns the
number of bytes: fewer at the end of the file. Waits and signals as OPEN-FILE."
  (transfer engine +file-read+ file octets start end offset timeout))

(defun write-file (engine file octets &key (start 0) end offset timeout)
  "Writes the bytes of OCTETS from START to END to FILE at OFFSET: NIL for the file's own position, which moves, :END
for the end of the file. Returns the number of bytes, which is all. Waits and signals as OPEN-FILE."
  (transfer engine +file-write+ file octets start end offset timeout))

(defun sync-file (engine file &key data timeout)
  "Writes a file to the disk, without its times if :DATA is true. Waits and signals as OPEN-FILE."
  (operating (engine (if data +file-sync-data+ +file-sync+) :file file :timeout timeout) () (completion t)))

(defun truncate-file (engine file size &key timeout)
  "Sets the file's length to SIZE bytes. Waits and signals as OPEN-FILE."
  (operating (engine +file-truncate+ :file file :timeout timeout) ((bytes size)) (completion t)))

(defun allocate-file (engine file offset size &key timeout)
  "Allocates disk space for SIZE bytes at OFFSET; the file becomes so long. Waits and signals as OPEN-FILE."
  (operating (engine +file-allocate+ :file file :timeout timeout) ((offset offset) (bytes size)) (completion t)))

(defun file-kind (number)
  (nth number '(:unknown :regular :directory :symbolic-link :fifo :socket :character-device :block-device)))

(defun status-at (sap)
  (macrolet ((fields (&rest fields)
               `(list ,@(loop for field in fields
                              append `(,(intern (symbol-name field) '#:keyword) (,(name "stat.~a" field) sap))))))
    (list* :kind (file-kind (stat.kind sap))
           (fields mode bytes allocated-bytes links uid gid device-major device-minor inode accessed-ns modified-ns
                   changed-ns created-ns))))

(defun file-status (engine file-or-path &key link timeout)
  "Returns the status of an open file or a path, with :LINK T of a symbolic link itself: a property list with :KIND,
:REGULAR,
:DIRECTORY and so on; :MODE, :BYTES, :LINKS, :UID, :MODIFIED-NS and the other fields of pelton_stat. Times are in
nanoseconds since 1970. Waits and signals as OPEN-FILE."
  (flet ((status (completion) (status-at (int-sap (file-completion.stat completion)))))
    (if (typep file-or-path 'file)
        (operating (engine +file-stat+ :file file-or-path :timeout timeout) () (completion (status completion)))
        (with-path (name file-or-path)
          (operating (engine (if link +file-stat-link+ +file-stat+) :timeout timeout :name file-or-path) ((path name))
              (completion (status completion)))))))

(defun entries-at (sap size)
  "Each entry is its inode, a word; its kind, a byte; its name; and a 0."
  (let ((text (sap-octets sap size)))
    (loop with at = 0
          while (<= (+ at 10) size)
          collect (let ((end (position 0 text :start (+ at 9))))
                    (prog1 (cons (sb-ext:octets-to-string text :start (+ at 9) :end end :external-format :utf-8)
                                 (file-kind (aref text (+ at 8))))
                      (setf at (1+ end)))))))

(defun list-directory (engine path &key timeout)
  "Returns the entries of a directory, except . and .., a list of (NAME . KIND); kinds as FILE-STATUS, as far as the
directory has them. Waits up to TIMEOUT seconds for each some hundred entries. Signals as OPEN-FILE."
  (with-file (directory engine path :directory t :timeout timeout)
    (loop for entries = (operating (engine +file-list+ :file directory :timeout timeout :name path) ()
                            (completion (entries-at (int-sap (file-completion.text completion))
                                                    (ldb (byte 62 0) (file-completion.text-size completion)))))
          while entries
          append entries)))

(defmacro define-path-operation (name kind (&rest more) documentation)
  "MORE are parameters: fields of the operation."
  `(defun ,name (engine path ,@more &key timeout)
     ,documentation
     (with-path (name path)
       ,(if (equal more '(path-to))
            `(with-path (name-to path-to)
               (operating (engine ,kind :timeout timeout :name path) ((path name) (path-to name-to)) (completion t)))
            `(operating (engine ,kind :timeout timeout :name path) ((path name) ,@(mapcar #'list more more))
                 (completion t))))))

(define-path-operation unlink-file +file-unlink+ ()
  "Removes a file that is no directory. Waits and signals as OPEN-FILE.")
(define-path-operation remove-directory +file-remove-directory+ ()
  "Removes an empty directory. Waits and signals as OPEN-FILE.")
(define-path-operation make-directory +file-make-directory+ (mode)
  "Creates a directory with the permissions MODE, for instance #o777, less the umask. Waits and signals as OPEN-FILE.")
(define-path-operation rename-path +file-rename+ (path-to)
  "Renames a file or directory to PATH-TO, which it replaces. Waits and signals as OPEN-FILE.")
(define-path-operation link-file +file-link+ (path-to)
  "Gives a file the second name PATH-TO. Waits and signals as OPEN-FILE.")

(defun read-file-octets (engine path &key timeout)
  "Returns everything that a file has, a fresh vector of bytes. Waits up to TIMEOUT seconds for each operation. Signals
as OPEN-FILE."
  (with-file (file engine path :timeout timeout)
    (let ((parts '()) (offset 0) (size (max 4096 (getf (file-status engine file :timeout timeout) :bytes))))
      (loop
        (let* ((octets (make-octets size)) (read (read-file engine file octets :offset offset :timeout timeout)))
          (push (if (= read size) octets (subseq octets 0 read)) parts)
          (incf offset read)
          ;; It may have grown meanwhile.
          (when (< read size)
            (return (if (rest parts) (joined (nreverse parts)) (first parts)))))))))

(defun write-file-octets (engine path octets &key (mode #o666) sync timeout)
  "Replaces the content of a file by OCTETS, and creates it with the permissions :MODE less the umask if there is none.
:SYNC T also writes it to the disk. Waits up to TIMEOUT seconds for each operation. Signals as OPEN-FILE: then the file
may have part of the content."
  (with-file (file engine path :direction :output :create t :truncate t :mode mode :timeout timeout)
    (write-file engine file octets :offset 0 :timeout timeout)
    (when sync (sync-file engine file :timeout timeout)))
  (values))
