;;;; One side of a workload in SBCL: `sbcl --script side.lisp JOB...`, started and ordered like any other side.
;;;;
;;;;   append SYSTEM THREADS SIZE CHECKED PASS...       SYSTEM: pelton-sbcl, pelton-sbcl-reserved,
;;;;                                                    sbcl-mutex, sbcl-compare-and-swap
;;;;   sender NAME WAIT CAPACITY SIZE PASS...
;;;;   receiver NAME WAIT CAPACITY SIZE PASS...
;;;;
;;;; A PASS is a count of messages, of each thread.

(require :asdf)
(asdf:load-asd (truename (merge-pathnames "../pelton.asd" *load-truename*)))
(let ((*standard-output* (make-broadcast-stream)) (*error-output* (make-broadcast-stream)))
  (asdf:load-system "pelton"))

(defpackage #:pelton-bench
  (:use #:cl)
  (:import-from #:pelton #:octets #:make-octets)
  (:import-from #:sb-sys #:sap-ref-64 #:with-pinned-objects #:vector-sap))

(in-package #:pelton-bench)

(declaim (optimize speed (safety 1) (debug 0)) (sb-ext:muffle-conditions sb-ext:compiler-note))

(deftype count* () '(unsigned-byte 48))
(defconstant +buffer+ (ash 1 20) "Bytes of a buffer.")

;;; ---- A side's reports

(defun now-ns ()
  "CLOCK_MONOTONIC, as on all sides."
  (multiple-value-bind (seconds nanoseconds) (sb-unix::clock-gettime 1)
    (+ (* seconds 1000000000) nanoseconds)))

(defun usage ()
  "CPU seconds, voluntary and involuntary context switches."
  (let ((values (multiple-value-list (sb-unix:unix-getrusage sb-unix:rusage_self))))
    (list (/ (+ (second values) (third values)) 1000000.0d0)
          (nth (- (length values) 2) values)
          (first (last values)))))

(defun say (control &rest arguments)
  (apply #'format *standard-output* control arguments)
  (terpri *standard-output*)
  (finish-output *standard-output*))

(defun go-on (listens)
  (say "\"ready\"")
  (let ((order (read-line)))
    (unless (string= order "go") (error "found the order ~s, wanted \"go\"" order)))
  (when listens (say "\"started\"")))

(defmacro reporting ((bytes) &body body)
  "Runs BODY, and reports its time and resources."
  `(let ((before (usage)) (start (now-ns)))
     ,@body
     (let ((end (now-ns)))
       (destructuring-bind (cpu voluntary involuntary) (mapcar #'- (usage) before)
         (say "{\"start_ns\":~d,\"end_ns\":~d,\"usage\":{\"cpu_seconds\":~,6f,\"voluntary_switches\":~d,\"involuntary_switches\":~d},~
               \"calls\":null,\"bytes\":~d,\"percentiles\":null,\"resident_bytes\":null}"
              start end cpu voluntary involuntary ,bytes)))))

;;; ---- The systems that threads append to
;;;
;;; Each makes records of messages, as pelton does, in buffers of 1 MiB, and passes full ones to a sink: a function of
;;; a SAP, the number of bytes there, and the number of messages.

(declaim (inline record-bytes write-record))
(defun record-bytes (size)
  (declare (type count* size))
  (+ 8 (logandc2 (+ size 7) 7)))

(defun write-record (buffer at number message)
  "Writes a header and MESSAGE into BUFFER, which has enough space, word by word."
  (declare (type octets buffer message) (type count* at) (type (unsigned-byte 32) number))
  (let ((place (ash at -3)))
    (loop for word of-type count* below (ash (+ (length message) 7) -3)
          do (setf (sb-kernel:%vector-raw-bits buffer (+ place 1 word)) (sb-kernel:%vector-raw-bits message word)))
    (setf (sb-kernel:%vector-raw-bits buffer place) (logior (ash number 32) (length message)))))

(defun give (sink buffer bytes size)
  (declare (type function sink) (type octets buffer))
  (with-pinned-objects (buffer)
    (funcall sink (vector-sap buffer) bytes (floor bytes (record-bytes size)))))

(defstruct pad (a 0 :type sb-ext:word) (b 0 :type sb-ext:word) (c 0 :type sb-ext:word) (d 0 :type sb-ext:word)
           (e 0 :type sb-ext:word)
  (f 0 :type sb-ext:word) (g 0 :type sb-ext:word) (h 0 :type sb-ext:word))

;; One buffer behind a lock: the thread that finds it full flushes it. A thread that is interrupted and unwinds must
;; neither double a buffer nor block others, as with pelton: so both are written without interrupts.
(defstruct locked
  (lock (sb-thread:make-mutex) :type sb-thread:mutex)
  (buffer (make-octets +buffer+) :type octets)
  (used 0 :type count*)
  (size 0 :type count*)
  (sink #'identity :type function))

(declaim (inline append-locked))
(defun append-locked (locked number message)
  (declare (type locked locked) (type octets message))
  (sb-sys:without-interrupts
    (sb-thread:with-mutex ((locked-lock locked))
      (let ((buffer (locked-buffer locked)) (need (record-bytes (length message))))
        (when (> (+ (locked-used locked) need) +buffer+)
          (give (locked-sink locked) buffer (locked-used locked) (locked-size locked))
          (setf (locked-used locked) 0))
        (write-record buffer (locked-used locked) number message)
        (incf (locked-used locked) need)))))

(defmacro waiting-while (condition)
  "Polls 64 times, and then yields the CPU."
  `(loop with looks of-type count* = 0
         while ,condition
         do (if (< (incf looks) 64) (sb-ext:spin-loop-hint) (sb-thread:thread-yield))))

;; Two buffers that alternate; each thread takes space by a compare-and-swap of the bytes used, writes its message, and
;; publishes it by the header. The thread that finds a buffer full closes it, opens the other one, waits for the headers
;; of all others, flushes the full one and clears it. A buffer that is not open stays closed, so no thread that read its
;; state long ago can take space there. On x86-64 stores become visible in order, and the compare-and-swap is a barrier.
(defconstant +closed+ (ash 1 40))

(defstruct (region (:include pad))
  (used +closed+ :type sb-ext:word) (p1 0 :type sb-ext:word) (p2 0 :type sb-ext:word) (p3 0 :type sb-ext:word)
  (p4 0 :type sb-ext:word) (p5 0 :type sb-ext:word) (p6 0 :type sb-ext:word) (p7 0 :type sb-ext:word)
  (buffer (make-array +buffer+ :element-type '(unsigned-byte 8) :initial-element 0) :type octets))

(defstruct (swapped (:include pad))
  (region (make-region :used 0) :type region)
  (q1 0 :type sb-ext:word) (q2 0 :type sb-ext:word) (q3 0 :type sb-ext:word) (q4 0 :type sb-ext:word)
  (q5 0 :type sb-ext:word) (q6 0 :type sb-ext:word) (q7 0 :type sb-ext:word)
  ;; NIL while it is flushed.
  (spare (make-region) :type (or null region))
  (size 0 :type count*)
  (sink #'identity :type function))

(defmacro uninterrupted (&body body)
  "As SB-SYS:WITHOUT-INTERRUPTS, for a BODY that nothing unwinds: so it needs no binding, which takes a few ns."
  `(let ((enabled sb-sys:*interrupts-enabled*))
     (setf sb-sys:*interrupts-enabled* nil)
     ,@body
     (when enabled
       (setf sb-sys:*interrupts-enabled* enabled)
       (when sb-sys:*interrupt-pending* (sb-unix::receive-pending-interrupt)))))

(defun hand-over (swapped region bytes)
  "Passes a closed buffer with BYTES of records to the sink, once all are written, and clears it."
  (declare (type swapped swapped) (type region region) (type count* bytes))
  (let ((buffer (region-buffer region)))
    (loop with at of-type count* = 0
          while (< at bytes)
          do (waiting-while (progn (sb-thread:barrier (:read)) (zerop (sb-kernel:%vector-raw-bits buffer (ash at -3)))))
             (incf at (record-bytes (ldb (byte 32 0) (sb-kernel:%vector-raw-bits buffer (ash at -3))))))
    (give (swapped-sink swapped) buffer bytes (swapped-size swapped))
    (dotimes (word (ash bytes -3)) (setf (sb-kernel:%vector-raw-bits buffer word) 0))))

(defun leave-region (swapped region used)
  "Flushes the full buffer and opens the other one, or waits until another thread has opened it."
  (declare (type swapped swapped) (type region region) (type count* used))
  (cond ((and (<= used +buffer+) (= used (sb-ext:compare-and-swap (region-used region) used +closed+)))
         (waiting-while (null (swapped-spare swapped)))
         (let ((next (shiftf (swapped-spare swapped) nil)))
           (declare (type region next))
           (setf (region-used next) 0)
           (sb-thread:barrier (:write))
           (setf (swapped-region swapped) next))
         (hand-over swapped region used)
         (sb-thread:barrier (:write))
         (setf (swapped-spare swapped) region))
        (t (waiting-while (and (eq region (swapped-region swapped)) (= (region-used region) +closed+))))))

(declaim (inline append-swapped))
(defun append-swapped (swapped number message)
  (declare (type swapped swapped) (type octets message) (type (unsigned-byte 32) number))
  (let ((need (record-bytes (length message))))
    ;; Without interrupts: others would wait without end for a thread that unwinds here.
    (uninterrupted
      (loop
        (let* ((region (swapped-region swapped)) (used (ldb (byte 48 0) (region-used region))))
          (cond ((> (+ used need) +buffer+) (leave-region swapped region used))
                ((= used (sb-ext:compare-and-swap (region-used region) used (+ used need)))
                 (write-record (region-buffer region) used number message)
                 (return))))))))

(defun finish-swapped (swapped)
  (let* ((region (swapped-region swapped)) (used (ldb (byte 48 0) (region-used region))))
    (when (plusp used) (hand-over swapped region used))))

;;; ---- Appending

(defmacro each-thread ((thread threads) &body body)
  `(mapc #'sb-thread:join-thread
         (loop for number of-type (unsigned-byte 16) below ,threads
               collect (let ((,thread number))
                         (declare (type (unsigned-byte 16) ,thread) (ignorable ,thread))
                         (sb-thread:make-thread (lambda () ,@body))))))

(defmacro messages ((n thread message count size numbered) append)
  "COUNT times APPEND, of a message of SIZE bytes; NUMBERED: each has its thread's and its own number."
  `(let ((,message (make-array ,size :element-type '(unsigned-byte 8) :initial-element 7)))
     (setf (sb-kernel:%vector-raw-bits ,message 0) (ash ,thread 40))
     (cond (,numbered (dotimes (,n ,count)
                        (declare (type count* ,n))
                        (setf (sb-kernel:%vector-raw-bits ,message 0) (logior (ash ,thread 40) ,n))
                        ,append))
           (t (dotimes (,n ,count) (declare (type count* ,n)) ,append)))))

(defun append-all (system threads size count numbered sink)
  "Returns the function that does it, with the buffers allocated."
  (declare (type (unsigned-byte 16) threads size) (type count* count) (type function sink))
  (ecase system
    ((:pelton-sbcl :pelton-sbcl-reserved)
     (let ((appenders (pelton:open-appenders (lambda (chunks)
                                               (pelton:do-chunks ((sap bytes :messages messages) chunks)
                                                                 (funcall sink sap bytes messages)))
                                             :flush-bytes +buffer+))
           (words (floor size 8)))
       (lambda ()
         (each-thread (thread threads)
           (if (eq system :pelton-sbcl)
               (messages (n thread message count size numbered) (pelton:append-message appenders message))
               (messages (n thread message count size numbered)
                         (pelton:with-reserved ((sap space) appenders size)
                           (declare (ignore space))
                           (dotimes (word words)
                             (setf (sap-ref-64 sap (* 8 word)) (sb-kernel:%vector-raw-bits message word)))))))
         (pelton:sync appenders)
         (pelton:close-handle appenders))))
    (:sbcl-mutex
     (let ((locked (make-locked :size size :sink sink)))
       (lambda ()
         (each-thread (thread threads)
           (messages (n thread message count size numbered)
                     (append-locked locked (ldb (byte 32 0) n) message)))
         (give sink (locked-buffer locked) (locked-used locked) size))))
    (:sbcl-compare-and-swap
     (let ((swapped (make-swapped :size size :sink sink)))
       (lambda ()
         (each-thread (thread threads)
           (messages (n thread message count size numbered)
                     (append-swapped swapped (ldb (byte 32 0) n) message)))
         (finish-swapped swapped))))))

(defun look-at-all (system threads size count)
  "A pass that checks every record."
  (declare (type (unsigned-byte 16) size))
  (let ((next (make-array threads :initial-element 0)) (found 0))
    (funcall (append-all system threads size count t
                         (lambda (sap bytes messages)
                           (declare (type sb-sys:system-area-pointer sap) (type count* bytes))
                           (loop for at of-type count* from 0 below bytes by (record-bytes size)
                                 do (let ((first (sap-ref-64 sap (+ at 8))))
                                      (multiple-value-bind (thread n) (floor first (ash 1 40))
                                        (unless (and (= (ldb (byte 32 0) (sap-ref-64 sap at)) size)
                                                     (< thread threads)
                                                     (= n (svref next thread))
                                                     (loop for byte from 8 below size always
                                                           (= 7 (sb-sys:sap-ref-8 sap (+ at 8 byte)))))
                                          (error "message ~x is not the expected one, or has wrong bytes" first))
                                        (incf (svref next thread))))
                                    (decf messages)
                                    (incf found))
                           (unless (zerop messages) (error "a buffer's number of messages is wrong")))))
    (unless (= found (* threads count)) (error "~d messages arrived, wanted ~d" found (* threads count)))))

(defun append-side (system threads size looked-at counts)
  (look-at-all system threads size looked-at)
  (dolist (count counts)
    (go-on nil)
    (let* ((messages 0) (bytes 0)
           (run (append-all system threads size count nil
                            (lambda (sap taken many)
                              (declare (type count* taken many messages bytes))
                              (unless (= (ldb (byte 32 0) (sap-ref-64 sap 0)) size)
                                (error "a buffer does not begin with a record"))
                              (incf messages many)
                              (incf bytes taken))))
           (consed (sb-ext:get-bytes-consed)))
      (reporting ((* messages size)) (funcall run))
      (when (sb-ext:posix-getenv "PELTON_BENCH_CONSED")
        (format *error-output* "~(~a~): ~,5f bytes consed a message~%" system
                (/ (- (sb-ext:get-bytes-consed) consed) messages 1.0)))
      (unless (and (= messages (* threads count)) (= bytes (* messages (record-bytes size))))
        (error "~d messages in ~d bytes arrived, wanted ~d" messages bytes (* threads count))))))

;;; ---- A stream

(defconstant +warm-up+ 16 "Messages before the first pass, with all bytes checked.")

(declaim (inline pattern))
(defun pattern (at)
  "The byte there of every message, after its number: as in bench/src/payload.rs."
  (declare (type (unsigned-byte 32) at))
  (ldb (byte 8 0) (+ (* at 31) (ash at -8) 7)))

(defun stamp (message n)
  (declare (type octets message))
  (setf (sb-kernel:%vector-raw-bits message 0) n))
(declaim (inline stamp))

(defun send-side (name wait capacity size counts)
  (declare (type (unsigned-byte 32) size))
  (pelton:with-sender (sender name :wait wait :capacity capacity :timeout 20)
    (flet ((buffer ()
             (let ((message (make-octets size)))
               (dotimes (i size message) (setf (aref message i) (pattern i))))))
            ;; Round-robin, each with its number long before the copy, as on all other sides: a vector load of bytes
            ;; just stored one by one stalls until the stores drain.
      (let ((even (buffer)) (odd (buffer)))
        (flet ((send (count)
                 (declare (type count* count))
                 (let ((message even) (next odd))
                   (declare (type octets message next))
                   (stamp message 0)
                   (dotimes (n count)
                     (pelton:send sender message)
                     (rotatef message next)
                     (stamp message (1+ n))))))
          (send +warm-up+)
          (loop for count in counts
                do (go-on nil)
                   (reporting ((* count size)) (send count))))))))

(defun receive-side (name wait capacity size counts)
  (declare (type (unsigned-byte 32) size))
  (pelton:with-receiver (receiver name :wait wait :capacity capacity :accept t :timeout 20)
    (let ((buffer (make-octets size)))
      (flet ((receive (count whole-from)
               (declare (type count* count whole-from))
               (dotimes (n count)
                 (let ((found (pelton:receive-into receiver buffer)))
                   (unless (and (= found size) (= (sb-kernel:%vector-raw-bits buffer 0) n))
                     (error "message ~d has ~d bytes and the number ~d" n found (sb-kernel:%vector-raw-bits buffer 0)))
                   (when (>= n whole-from)
                     (unless (loop for i of-type (unsigned-byte 32) from 8 below size always
                                   (= (aref buffer i) (pattern i)))
                       (error "message ~d has wrong bytes" n)))))))
        (receive +warm-up+ 0)
        (loop for count in counts
              do (go-on t)
                 (reporting ((* count size)) (receive count (1- count))))))))

(defun main (role &rest arguments)
  (flet ((numbers (list) (mapcar #'parse-integer list)))
    (if (string= role "append")
        (destructuring-bind (system threads size looked-at &rest counts) arguments
          (apply #'append-side (intern (string-upcase system) :keyword)
                 (append (numbers (list threads size looked-at)) (list (numbers counts)))))
        (destructuring-bind (name wait capacity size &rest counts) arguments
          (funcall (if (string= role "sender") #'send-side #'receive-side)
                   name (intern (string-upcase wait) :keyword) (parse-integer capacity) (parse-integer size)
                   (numbers counts))))
        ;; Until the program closes our input.
    (read-line *standard-input* nil)))

(handler-bind ((error (lambda (condition)
                        (format *error-output* "~a~%" condition)
                        (finish-output *error-output*)
                        (sb-ext:exit :code 1 :abort t))))
  (apply #'main (member-if (lambda (word) (member word '("append" "sender" "receiver") :test #'string=))
                           sb-ext:*posix-argv*)))
(sb-ext:exit :abort t :code 0)
